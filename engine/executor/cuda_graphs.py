"""Decodes as CUDA graphs: the host gives the GPU a whole step of the model at once.

A graph is recorded for each of a ladder of batch sizes, over inputs that stay where
they are; a step copies its own in, padded to the next rung. A padded row is a
sequence of no tokens: it attends to nothing, is written nowhere, and its logits are
cut off. Steps with chunks of prompts, and batches beyond the ladder, run as ever.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.executor.inputs import Plan, StepInputs
from engine.executor.paged_attention import PagedStep, attending
from engine.executor.step import Step
from kernels.metadata import AttentionMetadata

Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]
"""Turns work whose inputs stay where they are into what does it again."""

WARM_UPS = 2
MAX_BATCH = 256
"""Where a step's own work is long enough to hide what launching it takes."""


def ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are recorded, rising: padding adds 7 rows, or a quarter, at most.

    From 2: one token alone would not run compiled, see `compilation.jit`.
    """
    most = min(max(max_num_seqs, 2), MAX_BATCH)
    rungs = [2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, MAX_BATCH + 1, 32)]
    return [*(rung for rung in rungs if rung < most), most]


class DecodeGraphs:
    """A model's decodes, recorded."""

    def __init__(
        self,
        step: Step,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
        kv_scales: list[tuple[float, float]] | None,
        *,
        sizes: list[int],
        max_model_len: int,
        block_size: int,
        device: torch.device,
        plan: Plan,
        record: Record,
    ) -> None:
        """Records a graph for each size.

        Args:
            step: the model.
            layers: the cache, as in `PagedStep`.
            kv_scales: likewise.
            sizes: of batches, rising.
            max_model_len: most tokens of a sequence.
            block_size: of the cache.
            device: where the model is.
            plan: makes attention's plans.
            record: records; `cuda_recorder` on a GPU.
        """
        most = sizes[-1]
        self._sizes = sizes
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        width = -(-max_model_len // block_size)
        self._tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._replays: dict[int, Replay] = {}
        rows = torch.arange(most + 1, device=device)
        for size in reversed(sizes):  # the smaller fit into the memory of the larger
            metadata = AttentionMetadata(
                query_starts=rows[: size + 1].int(),
                seq_lens=self._seq_lens[:size],
                block_tables=self._tables[:size],
                slot_mapping=self._slots[:size],
                max_query_len=1,
                max_seq_len=max_model_len,
                plan=plan(np.ones(size, np.int32), np.full(size, max_model_len, np.int32)),
            )
            paged = PagedStep(metadata, layers, kv_scales)
            inputs = self._tokens[:size][None], self._positions[:size][None], rows[:size]

            def work(
                paged: PagedStep = paged, inputs: tuple[torch.Tensor, ...] = inputs
            ) -> torch.Tensor:
                with attending(paged):
                    return step(*inputs)

            self._replays[size] = record(work)

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits of a step, one row a sequence; none if it is not all decodes, or too many.

        The logits are overwritten by the next step.
        """
        count = inputs.token_ids.shape[1]
        decodes = inputs.metadata.max_query_len == 1 and len(inputs.sampled) == count
        if not decodes or inputs.scored or count > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= count)
        tables = inputs.metadata.block_tables
        self._tokens[:count] = inputs.token_ids[0]
        self._positions[:count] = inputs.positions[0]
        self._seq_lens[:count] = inputs.metadata.seq_lens
        self._seq_lens[count:size] = 0
        self._slots[:count] = inputs.metadata.slot_mapping
        self._slots[count:size] = -1
        self._tables[:count, : tables.shape[1]] = tables
        return self._replays[size]()[:count]


def cuda_recorder() -> Record:
    """Records CUDA graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Replay) -> Replay:
        for _ in range(WARM_UPS):  # what is compiled or allocated once is so before
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    return record
