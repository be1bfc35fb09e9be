"""Turn a batch into the tensors that one step of the model takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from octavo.engine.kv_cache.block_table import RELEASED
from octavo.engine.memory.cache_layout import CacheLayout, Planner
from octavo.engine.sampling.sampler import SamplingRow, take_greatest
from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.steady import NO_DECODES, Decodes
from octavo.kernels.host import to_device
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a step computes, as plain arrays: all that another rank must know of a batch.

    Attributes:
        laid: `[2 + groups, num_tokens]` int64: token ids, positions, and the slots of each group.
        query_starts: `[num_seqs + 1]` int32, each sequence's first token in the batch.
        query_lens: `[num_seqs]` int32, each sequence's tokens in the batch.
        seq_lens: `[num_seqs]` int32, and with those before.
        rows: `[num_rows]` int64, the tokens whose logits are wanted; the first where none are.
        tables: `[num_seqs, width]` int32, each group's block tables.
    """

    laid: np.ndarray
    query_starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    rows: np.ndarray
    tables: Sequence[np.ndarray]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors, all sequences laid end to end, and what its logits are for.

    Attributes:
        token_ids: `[1, num_tokens]` int64.
        positions: `[1, num_tokens]` int64.
        logit_rows: `[num_rows]` int64, the tokens whose logits are wanted; the first
            where none are.
        groups: for the attention of each layer group.
        steady: the sequences whose logits are the first, one row each, to sample for.
        sampled: the others to sample for.
        beams: the beams to find continuations of.
        scored: first row of the prompt's logits, by index in the batch of the scheduled
            sequence, for those that want prompt log-probabilities.
        adapters: the sequences' adapters; None if no sequence has one.
        num_chunks: sequences with several tokens: chunks of prompts and drafts.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    groups: Sequence[AttentionMetadata]
    steady: Decodes = NO_DECODES
    sampled: list[SamplingRow] = field(default_factory=list)
    beams: list[SamplingRow] = field(default_factory=list)
    scored: dict[int, int] = field(default_factory=dict)
    adapters: StepAdapters | None = None
    num_chunks: int = 0

    @property
    def take_greatest(self) -> bool:
        """Whether the step is for the most likely of the allowed tokens alone."""
        if self.beams or self.scored:
            return False
        return self.steady.takes_greatest and take_greatest(self.sampled)


def make_inputs(
    batch: Batch, *, layout: CacheLayout, device: torch.device, planners: Sequence[Planner]
) -> tuple[StepArrays, StepInputs]:
    """Lay a batch's sequences end to end.

    The steady ones come first.

    Args:
        batch: what to compute.
        layout: the cache's layout.
        device: the cache's device.
        planners: plan the attention of each layer group.
    """
    steady = batch.steady
    count = len(steady)
    tokens = [sequence.token_ids[-1] for sequence in steady.sequences]
    rows: list[int] = []  # of the others
    starts: list[int] = []
    ends: list[int] = []
    firsts: list[int] = []  # of their positions
    sampled: list[SamplingRow] = []
    beams: list[SamplingRow] = []
    scored: dict[int, int] = {}
    for i, scheduled in enumerate(batch.ruled):
        group, sequence, start, end, _, drawing, draft = scheduled
        starts.append(len(tokens))
        firsts.append(start)
        ends.append(end)
        if end == start + 1:
            tokens.append(sequence.token_ids[start])
        else:
            tokens += sequence.token_ids[start:end]
            tokens += draft
        if positions_scored := scheduled.scored:
            scored[i] = count + len(rows)
            rows.extend(len(tokens) - end + position for position in positions_scored)
        if drawing:
            drawn = beams if group.beam is not None else sampled
            for each in drawing:
                drawn.append(SamplingRow(group, each, count + len(rows)))
            rows.append(len(tokens) - 1 - len(draft))
            for drafted in range(1, len(draft) + 1):
                drawn.append(SamplingRow(group, sequence, count + len(rows), draft[:drafted]))
                rows.append(len(tokens) - 1 - len(draft) + drafted)
    query_starts = np.arange(count + len(starts) + 1, dtype=np.int32)
    query_starts[count:] = [*starts, len(tokens)]
    query_lens = np.diff(query_starts)
    laid = np.empty((2 + len(layout.groups), len(tokens)), np.int64)
    laid[0] = tokens
    laid[1, :count] = steady.starts
    shifts = np.array(firsts, np.int64) - starts
    laid[1, count:] = np.arange(count, len(tokens)) + np.repeat(shifts, query_lens[count:])
    for group_number, layers in enumerate(layout.groups):
        size = None if layers.state_blocks else layers.block_size
        laid[2 + group_number] = _slots(batch, group_number, size)
    arrays = StepArrays(
        laid=laid,
        query_starts=query_starts,
        query_lens=query_lens,
        seq_lens=np.concatenate([steady.starts + 1, ends], dtype=np.int32, casting="unsafe"),
        rows=np.concatenate([np.arange(count), np.array(rows or [0] * (not count), np.int64)]),
        tables=[
            _tables(batch, group_number, released=layers.bounded)
            for group_number, layers in enumerate(layout.groups)
        ],
    )
    inputs = to_inputs(arrays, device=device, planners=planners)
    return arrays, replace(inputs, steady=steady, sampled=sampled, beams=beams, scored=scored)


def to_inputs(
    arrays: StepArrays,
    *,
    device: torch.device,
    planners: Sequence[Planner],
    longest: int | None = None,
) -> StepInputs:
    """Return a step's tensors, without what its logits are for.

    Args:
        arrays: what to compute.
        device: the cache's device.
        planners: plan the attention of each layer group.
        longest: tokens per sequence that attention is planned for; default: those there are.
    """
    laid = to_device(arrays.laid, device)
    query_starts = to_device(arrays.query_starts, device)
    lengths = to_device(arrays.seq_lens, device)
    query_lens, seq_lens = arrays.query_lens, arrays.seq_lens
    planned = seq_lens if longest is None else np.full_like(seq_lens, longest)
    groups = [
        AttentionMetadata(
            query_starts=query_starts,
            seq_lens=lengths,
            block_tables=to_device(table, device),
            slot_mapping=laid[2 + group],
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            plan=planners[group](query_lens, planned),
        )
        for group, table in enumerate(arrays.tables)
    ]
    several = int(np.count_nonzero(query_lens > 1))
    wanted = to_device(arrays.rows, device)
    return StepInputs(laid[0:1], laid[1:2], wanted, groups, num_chunks=several)


def _tables(batch: Batch, group: int, *, released: bool) -> np.ndarray:
    """Return a layer group's block tables; what attention does not read is 0."""
    if not batch.ruled:
        return batch.steady.tables[group]
    steady = batch.steady.tables[group] if batch.steady else np.empty((0, 0), np.int32)
    ruled = [each.tables[group] for each in batch.ruled]
    count, width = steady.shape
    tables = np.zeros((count + len(ruled), max(width, *map(len, ruled))), np.int32)
    tables[:count, :width] = steady
    for row, blocks in zip(tables[count:], ruled, strict=True):
        row[: len(blocks)] = blocks
    if released:
        tables[tables == RELEASED] = 0
    return tables


def _slots(batch: Batch, group: int, size: int | None) -> np.ndarray:
    """Return the slots of a batch's tokens in the blocks of a layer group; -1 if those are states.

    A token's slot is `block * block_size + offset`.
    """
    if size is None:
        return np.full(batch.num_tokens, -1)
    steady = batch.steady
    found = []
    if steady:
        places, offsets = np.divmod(steady.starts, size)
        found.append(steady.tables[group][np.arange(len(steady)), places] * size + offsets)
    for each in batch.ruled:
        first = each.start // size
        blocks = np.array(each.tables[group][first : -(-each.end // size)], np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).ravel()
        found.append(slots[each.start - first * size : each.end - first * size])
    return np.concatenate(found)


def idle_arrays(query_lens: Sequence[int], layout: CacheLayout) -> StepArrays:
    """Return a step that reads the cache's first block, and writes only states there.

    Args:
        query_lens: tokens of each sequence, none before them.
        layout: the cache's layout.
    """
    lengths = np.array(query_lens, np.int32)
    starts = np.concatenate([[0], lengths]).cumsum(dtype=np.int32)
    laid = np.full((2 + len(layout.groups), int(starts[-1])), -1)
    laid[:2] = 0
    count = len(query_lens)
    tables = [np.zeros((count, max(1, g.state_blocks)), np.int32) for g in layout.groups]
    return StepArrays(laid, starts, lengths, lengths, np.zeros(count, np.int64), tables)
