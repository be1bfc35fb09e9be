"""Decode steps as CUDA graphs: the host launches a whole step of the model at once.

A graph is recorded for each of several batch sizes, with inputs at fixed addresses. A step
copies its inputs there, padded to the next size. A padded row is a sequence of no tokens: it
attends to nothing, writes no K/V, and its logits are cut off. Steps with chunks of prompts,
and larger batches, are launched kernel by kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch

from octavo.engine.attention.operator import PagedStep, attending
from octavo.engine.memory.cache_layout import Planner
from octavo.engine.models.step import Step
from octavo.engine.running.inputs import StepInputs
from octavo.kernels.metadata import AttentionMetadata, LayerCache, StateCache

Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]
"""Records work on inputs at fixed addresses; returns what replays it."""

WARM_UPS = 2
MAX_BATCH = 256
"""Above this size, a step takes longer to compute than to launch."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to record, rising: padding adds at most 7 rows, or a quarter.

    They start at 2: one token alone would not run compiled, see `compilation.jit`.
    """
    most = min(max(max_num_seqs, 2), MAX_BATCH)
    sizes = [2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, MAX_BATCH + 1, 32)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True, slots=True)
class RecordedDecode:
    """One recorded batch size.

    A graph holds addresses and does not keep the tensors alive that it reads, so they are
    kept here.

    Attributes:
        replay: runs the step again.
        paged: the metadata and the caches that attention reads.
        inputs: tokens, positions and logit rows.
    """

    replay: Replay
    paged: PagedStep
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DecodeGraphs:
    """A model's recorded decode steps.

    All sizes write their logits to one buffer: one per size would take 0.8 GB for a
    vocabulary of 128k tokens.
    """

    def __init__(
        self,
        step: Step,
        layers: list[LayerCache],
        kv_scales: list[tuple[float, float]] | None,
        states: Sequence[StateCache] = (),
        *,
        sizes: list[int],
        widths: Sequence[int],
        max_model_len: int,
        device: torch.device,
        planners: Sequence[Planner],
        record: Record,
    ) -> None:
        """Record a graph for each size.

        Args:
            step: the model.
            layers: the cache, as in `PagedStep`.
            kv_scales: likewise.
            states: likewise.
            sizes: of batches, rising.
            widths: most blocks in a sequence's table of each layer group.
            max_model_len: most tokens of a sequence.
            device: the model's device.
            planners: plan the attention of each layer group.
            record: records; `cuda_recorder` on a GPU.
        """
        most = sizes[-1]
        self._step = step
        self._sizes = sizes
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.full((len(widths), most), -1, dtype=torch.int64, device=device)
        self._tables = [
            torch.zeros((most, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._logits: torch.Tensor | None = None
        self._recorded: dict[int, RecordedDecode] = {}
        rows = torch.arange(most + 1, device=device)
        query_starts = rows.int()
        for size in reversed(sizes):  # the smaller fit into the memory of the larger
            lengths = np.ones(size, np.int32), np.full(size, max_model_len, np.int32)
            groups = [
                AttentionMetadata(
                    query_starts=query_starts[: size + 1],
                    seq_lens=self._seq_lens[:size],
                    block_tables=tables[:size],
                    slot_mapping=slots[:size],
                    max_query_len=1,
                    max_seq_len=max_model_len,
                    plan=plan(*lengths),
                )
                for tables, slots, plan in zip(self._tables, self._slots, planners, strict=True)
            ]
            paged = PagedStep(groups, layers, kv_scales, states)
            inputs = self._tokens[:size][None], self._positions[:size][None], rows[:size]
            replay = record(partial(self._work, paged, inputs))
            self._recorded[size] = RecordedDecode(replay, paged, inputs)

    def _work(
        self, paged: PagedStep, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Run the step and return its logits, as the first rows of the shared buffer."""
        with attending(paged):
            logits = self._step(*inputs)
        if self._logits is None:  # the first is the largest, and runs before it is recorded
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Return a step's logits, one row per sequence; None if not all are decodes, or too many.

        The logits are overwritten by the next step.
        """
        count = inputs.token_ids.shape[1]
        decodes = inputs.groups[0].max_query_len == 1 and len(inputs.logit_rows) == count
        if not decodes or inputs.scored or count > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= count)
        self._tokens[:count] = inputs.token_ids[0]
        self._positions[:count] = inputs.positions[0]
        self._seq_lens[:count] = inputs.groups[0].seq_lens
        self._seq_lens[count:size] = 0
        for tables, slots, metadata in zip(self._tables, self._slots, inputs.groups, strict=True):
            given = metadata.block_tables
            tables[:count, : given.shape[1]] = given
            slots[:count] = metadata.slot_mapping
            slots[count:size] = -1
        return self._recorded[size].replay()[:count]


def cuda_recorder(*, check_inputs: bool = False) -> Record:
    """Return a recorder of CUDA graphs that share their memory.

    Args:
        check_inputs: raise at a replay if a tensor that PyTorch saw the graph read was freed.
            It is for tests of uncompiled models: PyTorch finds the tensors in a mode in which
            compiled steps run uncompiled, and checks each before each replay. It has no
            effect before PyTorch 2.13.
    """
    pool = torch.cuda.graph_pool_handle()
    options: dict[str, Any] = {}
    if check_inputs and "check_input_liveness" in signature(torch.cuda.graph).parameters:
        options["check_input_liveness"] = True

    def record(work: Replay) -> Replay:
        for _ in range(WARM_UPS):  # so that nothing is compiled or allocated while it records
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, **options):
            output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record


def graph_memory(
    sizes: list[int],
    record_sizes: Callable[[list[int], Record], object],
    record: Record,
    free: Callable[[], int],
) -> int:
    """Return the bytes of the device that graphs of all `sizes` take.

    It records two of them. The largest takes the memory that all sizes share, and the
    smallest only the memory that each graph takes for itself.

    Args:
        sizes: of batches, rising.
        record_sizes: makes `DecodeGraphs` of some sizes; they are dropped at the end.
        record: as for `DecodeGraphs`.
        free: returns the bytes that are free on the device.
    """
    left = [free()]

    def measured(work: Replay) -> Replay:
        replay = record(work)
        left.append(free())
        return replay

    recorded = record_sizes(sorted({sizes[0], sizes[-1]}), measured)
    del recorded
    whole, own = left[0] - left[1], left[1] - left[-1]
    return max(0, whole) + (len(sizes) - 1) * max(0, own)
