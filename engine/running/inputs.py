"""Turn a batch into the tensors that one step of the model takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.engine.kv_cache.block_table import RELEASED
from octavo.engine.memory.cache_layout import CacheLayout, Planner
from octavo.engine.sampling.sampler import SamplingRow
from octavo.engine.scheduling.batch import Batch
from octavo.kernels.host import to_device
from octavo.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors, all sequences laid end to end, and what its logits are for.

    Attributes:
        token_ids: `[1, num_tokens]` int64.
        positions: `[1, num_tokens]` int64.
        logit_rows: `[num_rows]` int64, the tokens whose logits are wanted; the first
            where none are.
        groups: for the attention of each layer group.
        sampled: the sequences to sample for.
        beams: the beams to find continuations of.
        scored: first row of the prompt's logits, by index in the batch of the scheduled
            sequence, for those that want prompt log-probabilities.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    groups: Sequence[AttentionMetadata]
    sampled: list[SamplingRow]
    beams: list[SamplingRow]
    scored: dict[int, int]


def make_inputs(
    batch: Batch, *, layout: CacheLayout, device: torch.device, planners: Sequence[Planner]
) -> StepInputs:
    """Lay a batch's sequences end to end.

    It builds lists: for a decode's few numbers they are faster than array operations.

    Args:
        batch: what to compute.
        layout: of the cache.
        device: the cache's device.
        planners: plan the attention of each layer group.
    """
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    starts = [0]
    ends: list[int] = []
    sampled: list[SamplingRow] = []
    beams: list[SamplingRow] = []
    scored: dict[int, int] = {}
    for i, scheduled in enumerate(batch.sequences):
        group, sequence, start, end, _, drawing = scheduled
        if end == start + 1:
            tokens.append(sequence.token_ids[start])
            positions.append(start)
        else:
            tokens += sequence.token_ids[start:end]
            positions += range(start, end)
        starts.append(len(tokens))
        ends.append(end)
        if positions_scored := scheduled.scored:
            scored[i] = len(rows)
            rows.extend(len(tokens) - end + position for position in positions_scored)
        if drawing:
            drawn = beams if group.beam is not None else sampled
            for each in drawing:
                drawn.append(SamplingRow(group, each, len(rows)))
            rows.append(len(tokens) - 1)
    seq_lens, query_lens = np.array(ends, np.int32), np.diff(np.array(starts, np.int32))
    slots = [
        [-1] * len(tokens) if layers.state_blocks else _all_slots(batch, group, layers.block_size)
        for group, layers in enumerate(layout.groups)
    ]
    laid = to_device(np.array((tokens, positions, *slots)), device)
    query_starts = to_device(np.array(starts, np.int32), device)
    lengths = to_device(seq_lens, device)
    groups = [
        AttentionMetadata(
            query_starts=query_starts,
            seq_lens=lengths,
            block_tables=to_device(_tables(batch, group, released=layers.bounded), device),
            slot_mapping=laid[2 + group],
            max_query_len=int(query_lens.max()),
            max_seq_len=max(ends),
            plan=planners[group](query_lens, seq_lens),
        )
        for group, layers in enumerate(layout.groups)
    ]
    return StepInputs(
        token_ids=laid[0:1],
        positions=laid[1:2],
        logit_rows=to_device(np.array(rows or [0]), device),
        groups=groups,
        sampled=sampled,
        beams=beams,
        scored=scored,
    )


def _tables(batch: Batch, group: int, *, released: bool) -> np.ndarray:
    """Return a layer group's block tables; what attention does not read is 0."""
    width = max(len(scheduled.tables[group]) for scheduled in batch.sequences)
    tables = np.zeros((len(batch.sequences), width), np.int32)
    for i, scheduled in enumerate(batch.sequences):
        blocks = scheduled.tables[group]
        tables[i, : len(blocks)] = blocks
    if released:
        tables[tables == RELEASED] = 0
    return tables


def _all_slots(batch: Batch, group: int, block_size: int) -> list[int]:
    """Return the slots of a batch's tokens in the blocks of a layer group."""
    slots: list[int] = []
    for scheduled in batch.sequences:
        slots += _slots(scheduled.tables[group], scheduled.start, scheduled.end, block_size)
    return slots


def _slots(blocks: list[int], start: int, end: int, block_size: int) -> Iterable[int]:
    """Return the slots of a sequence's tokens [start, end): `block * block_size + offset` each."""
    first, offset = divmod(start, block_size)
    if end == start + 1:
        return (blocks[first] * block_size + offset,)
    reached = blocks[first : -(-end // block_size)]
    slots = [slot for b in reached for slot in range(b * block_size, (b + 1) * block_size)]
    return slots[offset : offset + end - start]


def idle_inputs(
    query_lens: np.ndarray,
    *,
    longest: int,
    layout: CacheLayout,
    device: torch.device,
    planners: Sequence[Planner],
) -> StepInputs:
    """Return the inputs of a step that reads the cache's first block, and writes only states there.

    Args:
        query_lens: `[num_seqs]` int32; tokens of each sequence, none before them.
        longest: tokens per sequence that attention is planned for.
        layout: of the cache.
        device: the cache's device.
        planners: plan the attention of each layer group.
    """
    count = len(query_lens)
    starts = np.concatenate([[0], query_lens]).cumsum(dtype=np.int32)
    tokens = torch.zeros((1, int(starts[-1])), dtype=torch.int64, device=device)
    most = int(query_lens.max())
    query_starts, lengths = to_device(starts, device), to_device(query_lens, device)
    groups = [
        AttentionMetadata(
            query_starts=query_starts,
            seq_lens=lengths,
            block_tables=torch.zeros(
                (count, max(1, layers.state_blocks)), dtype=torch.int32, device=device
            ),
            slot_mapping=torch.full_like(tokens[0], -1),
            max_query_len=most,
            max_seq_len=most,
            plan=plan(query_lens, np.full(count, longest)),
        )
        for layers, plan in zip(layout.groups, planners, strict=True)
    ]
    return StepInputs(tokens, tokens, tokens[0, :count], groups, sampled=[], beams=[], scored={})
