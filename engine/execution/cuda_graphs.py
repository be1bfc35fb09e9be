"""Steps as CUDA graphs: the host launches a whole step of the model at once.

A graph is recorded for each of several batch sizes, with inputs at fixed addresses. A step copies
its inputs there, padded to the next size. A padding row belongs to a sequence without tokens: it
attends to nothing, writes no K/V, and its logits are dropped. Larger steps and steps with prompt
log-probabilities are launched kernel by kernel.

Steps with adapters have graphs of their own, in which the model runs uncompiled. The adapters' rows
and tiles and the addresses of their matrices are inputs. Steps with too many adapters, or one of a
high rank, are launched kernel by kernel.

A step that verifies drafts has several rows for some sequences: the last token and the drafted
ones. Its graphs have room for drafts of any length, but rows are contiguous as in any batch, and
the graph reads the begin of each sequence. So no sequence is padded, and none sees unwritten keys.
The remaining rows belong to one extra dummy sequence without tokens.

The attention plan of these graphs is fixed: all sequences have the same number of pieces. Decodes
among which one is much longer than the others use the graph of a mixed step.

A mixed step has chunks of prompts beside decodes and drafts. Its graphs have room for any mix: the
attention plan, which lists the tiles of queries and the pieces of keys, is also an input, and so
are the rows whose logits are needed. So attention splits the keys of a few long sequences as it
does without a graph. If a kernel found its tiles itself, as in vLLM's unified attention, all
batches of a size would have the same number of pieces: too few for a few sequences, or too many for
many. The price is some idle programs. Piecewise graphs, one for each part of the model between two
attention calls, would leave a few launches per layer to the host.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.execution.graph_sizes import MOST_ADAPTERS, MOST_RANK, GraphSize
from octavo.engine.execution.inputs import StepInputs
from octavo.engine.models.forward import Forward
from octavo.engine.models.linear.adapted_layers import applying
from octavo.kernels.low_rank import RECORD, StepAdapters
from octavo.kernels.metadata import (
    AttentionMetadata,
    AttentionPlan,
    AttentionShape,
    LayerCache,
    StateCache,
)
from octavo.kernels.ops import plan_attention, plan_room

Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]
"""Records work on inputs at fixed addresses; returns its replay function."""


class RecordingError(RuntimeError):
    """A device cannot record a step, which it can still launch kernel by kernel."""


WARM_UPS = 2
FINER = 2
"""Factor of pieces from which a step of decodes takes a graph of a mixed step, whose plan is an
input. Its rows are padded to a multiple of `MIXED_STRIDE`."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The graph of one size.

    A graph holds addresses and does not keep its tensors alive, so this object does.

    Attributes:
        replay: Function that runs the step again.
        query_starts: First row of each sequence; an input if sequences have several rows.
        paged: The metadata and the caches that attention reads.
        inputs: Tokens, positions and logit rows.
        idle: The idle items of each group's plan, if plans are an input.
        adapters: Room for the step's adapters; None if it has none.
    """

    replay: Replay
    query_starts: torch.Tensor
    paged: PagedStep
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    idle: list[torch.Tensor]
    adapters: StepAdapters | None


class StepGraphs:
    """A model's recorded steps.

    All sizes write their logits to one buffer: a buffer per size would take 0.8 GB for a vocabulary
    of 128k tokens.
    """

    def __init__(
        self,
        forward: Forward,
        layers: list[LayerCache],
        kv_scales: list[tuple[float, float]] | None,
        states: Sequence[StateCache] = (),
        *,
        sizes: list[GraphSize],
        widths: Sequence[int],
        max_model_len: int,
        device: torch.device,
        shapes: Sequence[AttentionShape | None],
        record: Record,
        adapted_layers: int | None = None,
    ) -> None:
        """Record a graph for each size.

        Args:
            forward: The model.
            layers: The cache, as in `PagedStep`.
            kv_scales: Scales of keys and values, as in `PagedStep`.
            states: States, as in `PagedStep`.
            sizes: Sizes to record. A step uses the first size that it fits into.
            widths: Maximum number of blocks in a sequence's table of each layer group.
            max_model_len: Maximum number of tokens of a sequence.
            device: The model's device.
            shapes: Shape of each layer group's attention; None for states.
            record: The recorder; `cuda_recorder` on a GPU.
            adapted_layers: Number of layers that adapters may adapt, for steps with adapters; None:
                for steps without.
        """
        rows = max(size.rows for size in sizes)
        most = 1 + max(size.sequences for size in sizes)  # with the dummy sequence
        self._forward = forward
        self._sizes = sizes
        self._max_model_len = max_model_len
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(rows, device=device)
        self._wanted = torch.zeros(rows, dtype=torch.int64, device=device)
        self._num_logits = max(size.logits or size.rows for size in sizes)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.full((len(widths), rows), -1, dtype=torch.int64, device=device)
        self._tables = [
            torch.zeros((most, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._records: torch.Tensor | None = None
        if adapted_layers is not None:
            self._records = torch.zeros(
                (adapted_layers, MOST_ADAPTERS + 1, RECORD), dtype=torch.int64, device=device
            )
        self._logits: torch.Tensor | None = None
        self._recorded: dict[GraphSize, RecordedStep] = {}
        # Smaller sizes fit into the larger ones' memory.
        for size in sorted(sizes, key=lambda size: size.rows, reverse=True):
            query_starts = _query_starts(size).to(device)
            groups = self._metadata(size, query_starts, shapes)
            paged = PagedStep(groups, layers, kv_scales, states)
            laid = self._tokens[: size.rows][None], self._positions[: size.rows][None]
            wanted = self._wanted[: size.logits] if size.mixed else self._all_rows[: size.rows]
            inputs = *laid, wanted
            idle = [each.plan.items.clone() for each in groups if size.mixed and each.plan]
            adapters = None
            if self._records is not None:
                counts = size.rows, len(wanted)
                adapters = StepAdapters.with_room(*counts, self._records, MOST_RANK)
            replay = record(partial(self._work, paged, inputs, adapters))
            self._recorded[size] = RecordedStep(replay, query_starts, paged, inputs, idle, adapters)

    def _metadata(
        self, size: GraphSize, query_starts: torch.Tensor, shapes: Sequence[AttentionShape | None]
    ) -> list[AttentionMetadata]:
        """Return the metadata that the graph of a size reads, for each layer group."""
        count = len(query_starts) - 1
        return [
            AttentionMetadata(
                query_starts=query_starts,
                seq_lens=self._seq_lens[:count],
                block_tables=tables[:count],
                slot_mapping=slots[: size.rows],
                max_query_len=size.rows if size.longest > 1 else 1,
                max_seq_len=self._max_model_len,
                plan=self._plan(size, shape),
            )
            for tables, slots, shape in zip(self._tables, self._slots, shapes, strict=True)
        ]

    def _plan(self, size: GraphSize, shape: AttentionShape | None) -> AttentionPlan | None:
        """Return a graph's plan: an input for mixed steps, else fixed for all steps."""
        if size.mixed:
            return plan_room(size.sequences, size.chunks, size.rows, shape)
        query_lens = _query_lens(size)
        seq_lens = np.full(len(query_lens), self._max_model_len, np.int32)
        return plan_attention(query_lens, seq_lens, shape)

    def _work(
        self,
        paged: PagedStep,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        adapters: StepAdapters | None,
    ) -> torch.Tensor:
        """Run the step and return its logits, as the first rows of the shared buffer."""
        with attending(paged), applying(adapters):
            logits = self._forward(*inputs)
        if self._logits is None:  # the first is the largest, and runs before recording
            self._logits = logits.new_empty((self._num_logits, logits.shape[1]))
        return self._logits[: len(logits)].copy_(logits)

    def choose(self, inputs: StepInputs) -> GraphSize | None:
        """Return the size of the graph for a step; None if no graph fits.

        No graph fits if there are prompt log-probabilities, or the batch or its adapters are too
        large.
        """
        rows, batch, wanted = inputs.token_ids.shape[1], inputs.groups[0], len(inputs.logit_rows)
        count = len(batch.seq_lens)
        step = GraphSize(count, batch.max_query_len, rows, inputs.num_chunks, wanted)
        fitting = (size for size in self._sizes if size.holds(step))
        size = next(fitting, None)
        if size is None or inputs.scored:
            return None
        if self._is_cut_finer(inputs.groups, size):
            size = next((size for size in fitting if size.mixed), size)
        room = self._recorded[size].adapters
        if room is not None and (inputs.adapters is None or not room.holds(inputs.adapters)):
            return None
        return size

    def replay(self, size: GraphSize, inputs: StepInputs) -> torch.Tensor:
        """Return a step's logits, one row per needed token. The next step overwrites them.

        Args:
            size: The size of the graph, from `choose`.
            inputs: The step's inputs.
        """
        rows, batch, wanted = inputs.token_ids.shape[1], inputs.groups[0], len(inputs.logit_rows)
        count = len(batch.seq_lens)
        recorded = self._recorded[size]
        if recorded.adapters is not None:
            adapters = inputs.adapters
            assert adapters is not None
            if not size.mixed:  # beams' rows of logits are last: the graph's are in order
                adapters = replace(adapters, logits=adapters.tokens)
            recorded.adapters.take(adapters)
        self._tokens[:rows] = inputs.token_ids[0]
        self._positions[:rows] = inputs.positions[0]
        self._seq_lens[:count] = batch.seq_lens
        self._seq_lens[count:] = 0
        if size.longest > 1:
            recorded.query_starts[: count + 1] = batch.query_starts
            recorded.query_starts[count + 1 : -1] = rows
        for tables, slots, metadata in zip(self._tables, self._slots, inputs.groups, strict=True):
            block_tables = metadata.block_tables
            tables[:count, : block_tables.shape[1]] = block_tables
            slots[:rows] = metadata.slot_mapping
            slots[rows : size.rows] = -1
        if size.mixed:
            self._wanted[:wanted] = inputs.logit_rows
            self._wanted[wanted : size.logits] = 0
            self._take_plans(recorded, inputs.groups)
        logits = recorded.replay()[:wanted]
        if not inputs.in_order and not size.mixed:
            logits = logits.index_select(0, inputs.logit_rows)
        return logits

    def _is_cut_finer(self, groups: Sequence[AttentionMetadata], size: GraphSize) -> bool:
        """Return whether a step cuts its longest sequence much finer than the graph of a size does.

        The fixed plan of a graph without chunks gives all sequences the same number of pieces. That
        is too few for one that is much longer than the others.
        """
        if size.mixed:
            return False
        recorded = self._recorded[size].paged.groups
        return any(
            step.plan.most_pieces >= FINER * graph.plan.most_pieces
            for step, graph in zip(groups, recorded, strict=True)
            if step.plan is not None and graph.plan is not None
        )

    @staticmethod
    def _take_plans(recorded: RecordedStep, groups: Sequence[AttentionMetadata]) -> None:
        """Copy the plans of a mixed step's layer groups, if there are any."""
        rooms = [group.plan for group in recorded.paged.groups if group.plan is not None]
        plans = [group.plan for group in groups if group.plan is not None]
        for room, plan, idle in zip(rooms, plans, recorded.idle, strict=True):
            room.take(plan, idle)


def _query_lens(size: GraphSize) -> np.ndarray:
    """Return each sequence's maximum number of rows in a graph without chunks: `[n]` int32.

    In a graph of decodes, each missing sequence has one padding row. Otherwise one extra dummy
    sequence holds all padding rows.
    """
    spare = [size.rows] if size.longest > 1 else []
    return np.array([size.longest] * size.sequences + spare, np.int32)


def _query_starts(size: GraphSize) -> torch.Tensor:
    """Return the first row of each sequence while a graph is recorded: `[n + 1]` int32.

    In graphs of decodes these are fixed. In other graphs, all rows are padding while recording.
    """
    if size.longest == 1:
        return torch.arange(size.sequences + 1, dtype=torch.int32)
    starts = torch.zeros(size.sequences + 2, dtype=torch.int32)
    starts[-1] = size.rows
    return starts


def cuda_recorder(*, check_inputs: bool = False, ranks: bool = False) -> Record:
    """Return a recorder of CUDA graphs that share their memory and their stream.

    The end of a graph frees cuBLAS's workspace for its stream. In PyTorch's own capture stream,
    graphs of other recorders that still live would have their workspace there, too.

    Args:
        check_inputs: Whether a replay raises if a tensor that the graph reads was freed. It is for
            tests of uncompiled models: PyTorch finds the tensors in a mode in which compiled steps
            run uncompiled, and checks each before each replay. It has no effect before PyTorch
            2.13.
        ranks: Whether steps sum over ranks: then a thread of NCCL may call CUDA meanwhile.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {}
    if check_inputs and "check_input_liveness" in signature(torch.cuda.graph).parameters:
        options["check_input_liveness"] = True
    if ranks:
        options["capture_error_mode"] = "thread_local"

    def record(work: Replay) -> Replay:
        for _ in range(WARM_UPS):  # so that recording compiles and allocates nothing
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, **options):
                output = work()
        except RuntimeError as error:
            raise RecordingError(f"a step cannot be recorded: {error}") from error

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record


def graph_memory(
    sizes: list[GraphSize],
    record_sizes: Callable[[list[GraphSize], Record], object],
    record: Record,
    free: Callable[[], int],
) -> int:
    """Return the device bytes that graphs of all `sizes` take.

    It records only a few of them. The largest of decodes, of drafts and of mixed steps take the
    memory that all sizes share; the smallest take only what each graph needs for itself.

    Args:
        sizes: Sizes of each of these kinds in ascending order of rows.
        record_sizes: Records sizes: each once, or twice if there are steps with adapters. The
            graphs are dropped at the end.
        record: The argument of `StepGraphs`.
        free: Returns the bytes that are free on the device.
    """
    left = [free()]

    def measured(work: Replay) -> Replay:
        replay = record(work)
        left.append(free())
        return replay

    largest = {0 if size.mixed else size.longest: size for size in sizes}
    chosen = [size for size in sizes if size == sizes[0] or size in largest.values()]
    recorded = record_sizes(chosen, measured)
    del recorded
    gc.collect()  # graphs in cycles would otherwise die while later ones are recorded
    whole, per_graph = left[0] - left[-1], left[-2] - left[-1]
    per_size = (len(left) - 1) // len(chosen)
    return max(0, whole) + per_size * (len(sizes) - len(chosen)) * max(0, per_graph)
