"""Turns a batch into the tensors that one step of the model takes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.engine.scheduling.batch import Batch
from octavo.kernels.host import to_device
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan

Plan = Callable[[np.ndarray, np.ndarray], AttentionPlan | None]
"""Makes attention's plan of a step from its queries and tokens of each sequence."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors, all sequences laid end to end.

    Attributes:
        token_ids: `[1, num_tokens]` int64.
        positions: `[1, num_tokens]` int64.
        logit_rows: `[num_rows]` int64, the tokens whose logits are wanted; the first
            where none are.
        metadata: for attention.
        sampled: row of the logits to draw from, for slices that draw.
        scored: first row of the prompt's logits, for slices that want them.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    sampled: dict[int, int]
    scored: dict[int, int]


def prepare(batch: Batch, *, block_size: int, device: torch.device, plan: Plan) -> StepInputs:
    """Lays a batch out flat.

    By lists: a decode's few numbers are sooner written one by one than arrays are made of
    them and computed with.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    starts = [0]
    sampled: dict[int, int] = {}
    scored: dict[int, int] = {}
    width = max(len(part.blocks) for part in batch.slices)
    tables = np.zeros((len(batch.slices), width), np.int32)
    for i, part in enumerate(batch.slices):
        offset = len(tokens) - part.start
        tokens += part.sequence.token_ids[part.start : part.end]
        positions += range(part.start, part.end)
        slots += _slots(part.blocks, part.start, part.end, block_size)
        starts.append(len(tokens))
        tables[i, : len(part.blocks)] = part.blocks
        if part.scored:
            scored[i] = len(rows)
            rows.extend(offset + position for position in part.scored)
        if part.samplers:
            sampled[i] = len(rows)
            rows.append(len(tokens) - 1)
    ends = [part.end for part in batch.slices]
    counts = [part.end - part.start for part in batch.slices]
    seq_lens, query_lens = np.array(ends, np.int32), np.array(counts, np.int32)
    laid = to_device(np.array((tokens, positions, slots)), device)
    metadata = AttentionMetadata(
        query_starts=to_device(np.array(starts, np.int32), device),
        seq_lens=to_device(seq_lens, device),
        block_tables=to_device(tables, device),
        slot_mapping=laid[2],
        max_query_len=max(counts),
        max_seq_len=max(ends),
        plan=plan(query_lens, seq_lens),
    )
    return StepInputs(
        token_ids=laid[0:1],
        positions=laid[1:2],
        logit_rows=to_device(np.array(rows or [0]), device),
        metadata=metadata,
        sampled=sampled,
        scored=scored,
    )


def _slots(blocks: list[int], start: int, end: int, block_size: int) -> Iterable[int]:
    """Where a sequence's tokens [start, end) go: `block * block_size + offset` of each."""
    first, offset = divmod(start, block_size)
    if end == start + 1:
        return (blocks[first] * block_size + offset,)
    reached = blocks[first : -(-end // block_size)]
    slots = [slot for b in reached for slot in range(b * block_size, (b + 1) * block_size)]
    return slots[offset : offset + end - start]


def idle_inputs(
    query_lens: np.ndarray, *, longest: int, device: torch.device, plan: Plan
) -> StepInputs:
    """A step that leaves no trace: it reads the cache's first block and writes nothing.

    Args:
        query_lens: `[num_seqs]` int32; tokens of each sequence, none before them.
        longest: tokens that attention is planned for, as if sequences had so many.
        device: where the cache is.
        plan: makes attention's plan.
    """
    count = len(query_lens)
    starts = np.concatenate([[0], query_lens]).cumsum(dtype=np.int32)
    tokens = torch.zeros((1, int(starts[-1])), dtype=torch.int64, device=device)
    most = int(query_lens.max())
    metadata = AttentionMetadata(
        query_starts=to_device(starts, device),
        seq_lens=to_device(query_lens, device),
        block_tables=torch.zeros((count, 1), dtype=torch.int32, device=device),
        slot_mapping=torch.full_like(tokens[0], -1),
        max_query_len=most,
        max_seq_len=most,
        plan=plan(query_lens, np.full(count, longest)),
    )
    return StepInputs(tokens, tokens, tokens[0, :count], metadata, sampled={}, scored={})
