"""Converts a batch to the tensors of one step of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from octavo.engine.execution.step_arrays import StepArrays
from octavo.engine.kv_cache.block_table import RELEASED
from octavo.engine.memory.cache_layout import CacheLayout
from octavo.engine.scheduling.batch import NO_SAMPLES, Batch, Samples, ScheduledSequence
from octavo.engine.scheduling.image_encodes import ImageKey, image_key
from octavo.kernels.host_copies import to_device
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.metadata import AttentionMetadata, AttentionShape
from octavo.kernels.ops import plan_attention

FIRST_SIZE = 24
"""Number of rows in the middle of those that take the second of a kernel's tiles."""
LONGER_CHUNK = 32
"""Number of tokens of a chunk that kernels of stateful layers do not take one by one."""


@dataclass(frozen=True, slots=True)
class StepImages:
    """The tokens of a step whose embeddings are those of images.

    Attributes:
        rows: `[n]` int64, the tokens.
        parts: Where their embeddings are, in order: an encoded image, and its first and last rows.
        positions: `[3, 1, num_tokens]` int64, rotary positions of all tokens; None if the model has
            one for each, as any step.
        groups: The step's metadata if the tokens of an image attend to each other; else None.
        split: The arrays from which `groups` are made, for other ranks.
    """

    rows: torch.Tensor
    parts: list[tuple[ImageKey, slice]]
    positions: torch.Tensor | None
    groups: Sequence[AttentionMetadata] | None = None
    split: StepArrays | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors, with all sequences contiguous, and the uses of its logits.

    Attributes:
        token_ids: `[1, num_tokens]` int64.
        positions: `[1, num_tokens]` int64; `[3, 1, num_tokens]` with images of some models.
        logit_rows: `[num_rows]` int64, the tokens whose logits are needed; the first if none are.
        groups: Metadata for the attention of each layer group.
        samples: The tokens to sample, except beams'.
        sample_rows: Row of logits of each of `samples`.
        beams: The beams to find continuations of.
        beam_rows: Row of logits of each of `beams`.
        scored: Sequences with prompt log-probabilities to compute, each with the first row of its
            prompt's logits.
        adapters: The sequences' adapters; None if no sequence has one.
        num_chunks: Number of sequences with several tokens: chunks of prompts and drafts.
        graph: Number of the recorded graph that runs the step; 0 if none does.
        in_order: Whether `logit_rows` ascend: not if beams' are behind others'.
        spilled: Index of the sequence whose first tokens are in a file, and their number of units.
        images: The tokens that stand for images; None if there are none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    groups: Sequence[AttentionMetadata]
    samples: Samples = field(default_factory=lambda: NO_SAMPLES)
    sample_rows: list[int] = field(default_factory=list)
    beams: Samples = field(default_factory=lambda: NO_SAMPLES)
    beam_rows: list[int] = field(default_factory=list)
    scored: list[tuple[ScheduledSequence, int]] = field(default_factory=list)
    adapters: StepAdapters | None = None
    num_chunks: int = 0
    in_order: bool = True
    graph: int = 0
    spilled: tuple[int, int] | None = None
    images: StepImages | None = None

    def with_images(self, images: StepImages) -> "StepInputs":
        """Return the same step with images, and with the positions and metadata that they need."""
        positions = self.positions if images.positions is None else images.positions
        groups = self.groups if images.groups is None else images.groups
        return replace(self, images=images, positions=positions, groups=groups)

    @property
    def take_greatest(self) -> bool:
        """Whether the step only needs the most likely allowed tokens."""
        if self.beams or self.scored:
            return False
        return self.samples.take_greatest


def make_inputs(
    batch: Batch,
    *,
    layout: CacheLayout,
    device: torch.device,
    shapes: Sequence[AttentionShape | None],
    mutual: bool = False,
) -> tuple[StepArrays, StepInputs]:
    """Concatenate a batch's sequences.

    Args:
        batch: The batch.
        layout: Layout of the cache.
        device: The cache's device.
        shapes: Shape of each layer group's attention; None for states.
        mutual: Whether the tokens of an image attend to each other.
    """
    starts, ends = batch.starts, batch.ends
    query_lens = (ends - starts).astype(np.int32)
    query_starts = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    laid = np.empty((2 + len(layout.groups), int(query_starts[-1])), np.int64)
    laid[0] = _tokens(batch, starts, query_starts)
    seqs, positions = np.arange(len(starts)), starts  # each token's: decodes have one each
    if laid.shape[1] > len(starts):
        shifts = np.repeat(starts - query_starts[:-1], query_lens)
        seqs, positions = np.repeat(seqs, query_lens), np.arange(laid.shape[1]) + shifts
    laid[1] = positions
    tables = [batch.table(group) for group in range(len(layout.groups))]
    spilled = batch.spilled
    for group, layers in enumerate(layout.groups):
        if layers.state_blocks:
            laid[2 + group] = -1
            continue
        places, offsets = np.divmod(positions, layers.block_size)
        laid[2 + group] = tables[group][seqs, places] * layers.block_size + offsets
        if layers.bounded or spilled is not None:
            tables[group][tables[group] == RELEASED] = 0  # attention does not read them
    images = _images(batch, laid[1], starts, query_starts, device)
    samples = batch.samples()
    # A token is sampled from the logits of the token before it.
    flat = query_starts[samples.rows] + samples.positions - 1 - starts[samples.rows]
    first = np.ones(len(flat), np.bool_)
    first[1:] = flat[1:] != flat[:-1]  # new outputs share their prompt's logits
    wanted, others = flat[first], list[int]()
    beam_rows: list[int] = []
    beams = Samples() if batch.beams else NO_SAMPLES
    scored: list[tuple[ScheduledSequence, int]] = []
    for i, each in batch.beams:
        beams.groups += [each.group] * len(each.sampled)
        beams.sequences += each.sampled
        beam_rows += [len(wanted) + len(others)] * len(each.sampled)
        others.append(int(query_starts[i + 1]) - 1)
    for i, each in batch.scored:
        scored.append((each, len(wanted) + len(others)))
        others += (np.array(each.scored) + query_starts[i] - each.start).tolist()
    if not len(samples) and not others:
        others.append(0)
    arrays = StepArrays(
        laid=laid,
        query_starts=query_starts,
        query_lens=query_lens,
        seq_lens=ends.astype(np.int32),
        rows=np.concatenate([wanted, np.array(others, np.int64)]),
        tables=tables,
    )
    if images is not None and mutual:
        owners, lengths, seen = _seen(batch, starts, ends)
        split = replace(
            arrays,
            query_starts=np.concatenate([[0], lengths]).cumsum(dtype=np.int32),
            query_lens=lengths,
            seq_lens=seen,
            tables=[table[owners] for table in tables],
        )
        groups = to_inputs(split, device=device, shapes=shapes).groups
        images = replace(images, groups=groups, split=split)
    if device.type == "cuda":
        arrays = arrays.pack()
    inputs = replace(
        to_inputs(arrays, device=device, shapes=shapes),
        samples=samples,
        sample_rows=(first.cumsum() - 1).tolist(),
        beams=beams,
        beam_rows=beam_rows,
        scored=scored,
        spilled=None if spilled is None else (spilled[0], spilled[1].num_units),
    )
    return arrays, inputs if images is None else inputs.with_images(images)


def _images(
    batch: Batch,
    positions: np.ndarray,
    starts: np.ndarray,
    query_starts: np.ndarray,
    device: torch.device,
) -> StepImages | None:
    """Return the tokens that stand for images, and set the rotary positions of their sequences.

    Args:
        batch: The batch.
        positions: `[num_tokens]` int64, places of the tokens in their sequences; changed.
        starts: First token of each sequence.
        query_starts: Its place in the batch.
        device: The step's device.
    """
    rows, parts = list[np.ndarray](), list[tuple[ImageKey, slice]]()
    spread: dict[int, np.ndarray] = {}
    for i, each in enumerate(batch.rest, len(batch.plain)):
        request, first = each.group.request, int(query_starts[i] - starts[i])
        if request.rotary is not None:
            own = positions[query_starts[i] : query_starts[i + 1]]
            prompt = request.rotary[:, each.start : each.end]
            own += request.rotary_shift
            own[: prompt.shape[1]] = prompt[0]  # of text all three are the same
            spread[int(query_starts[i])] = prompt
        for image in request.images:
            begin, end = np.searchsorted(image.places, [each.start, each.end])
            if begin < end:
                rows.append(first + image.places[begin:end])
                parts.append((image_key(request, image), slice(begin, end)))
    if not rows:
        return None
    in_three = None
    if spread:
        three = np.tile(positions, (3, 1))
        for start, prompt in spread.items():
            three[:, start : start + prompt.shape[1]] = prompt
        in_three = to_device(three[:, None], device)
    return StepImages(to_device(np.concatenate(rows), device), parts, in_three)


def _seen(
    batch: Batch, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split a batch's sequences where tokens of images attend to each other.

    A token of an image is a sequence of its own, which sees all up to the image's last token.

    Returns:
        The parts, in columns `[n]`: the index of the sequence, the number of tokens, int32, and the
        number of tokens that the last one sees, int32.
    """
    parts: list[tuple[int, int, int]] = []
    for i, (group, start, end) in enumerate(
        zip(batch.groups, starts.tolist(), ends.tolist(), strict=True)
    ):
        at = start
        for image in group.request.images:
            gaps = np.flatnonzero(np.diff(image.places) > 1) + 1
            for run in np.split(image.places, gaps):
                first, last = max(int(run[0]), at), min(int(run[-1]) + 1, end)
                if first >= last:
                    continue
                if at < first:
                    parts.append((i, first - at, first))
                parts += [(i, 1, last)] * (last - first)
                at = last
        if at < end:
            parts.append((i, end - at, end))
    owners, lengths, seen = zip(*parts, strict=True)
    return np.array(owners), np.array(lengths, np.int32), np.array(seen, np.int32)


def _tokens(batch: Batch, starts: np.ndarray, query_starts: np.ndarray) -> np.ndarray:
    """Return the tokens of a batch, end to end."""
    tokens = np.empty(query_starts[-1], np.int64)
    sequences, drafts = batch.sequences, batch.drafts
    columns = zip(sequences, starts.tolist(), strict=True)
    tokens[query_starts[:-1]] = [sequence.token_ids[start] for sequence, start in columns]
    for i in np.flatnonzero(query_starts[1:] - query_starts[:-1] > 1).tolist():
        begin, end = int(query_starts[i]), int(query_starts[i + 1])
        start, draft = int(starts[i]), drafts.get(i, ())
        known = sequences[i].token_ids[start : start + end - begin - len(draft)]
        tokens[begin:end] = [*known, *draft]
    return tokens


def to_inputs(
    arrays: StepArrays,
    *,
    device: torch.device,
    shapes: Sequence[AttentionShape | None],
    longest: int | None = None,
) -> StepInputs:
    """Return a step's tensors, without the uses of its logits.

    Args:
        arrays: The step's arrays.
        device: The cache's device.
        shapes: Shape of each layer group's attention; None for states.
        longest: Tokens per sequence that attention is planned for; default: the actual ones.
    """
    laid, rows, query_starts, _, lengths, *tables = arrays.to(device)
    query_lens, seq_lens = arrays.query_lens, arrays.seq_lens
    planned = seq_lens if longest is None else np.full_like(seq_lens, longest)
    groups = [
        AttentionMetadata(
            query_starts=query_starts,
            seq_lens=lengths,
            block_tables=table,
            slot_mapping=laid[2 + group],
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            plan=plan_attention(query_lens, planned, shapes[group]),
        )
        for group, table in enumerate(tables)
    ]
    return StepInputs(
        laid[0:1],
        laid[1:2],
        rows,
        groups,
        num_chunks=int(np.count_nonzero(query_lens > 1)),
        in_order=bool((np.diff(arrays.rows) > 0).all()),
    )


def warm_up_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return numbers of tokens of steps that, with 1 and the maximum, need every tile of rows.

    Kernels of quantized weights and of experts have tiles for up to 16, up to 32 and more rows, and
    experts have some share of the tokens each: one of these numbers is in every doubling.
    """
    doublings = max(0, max_num_batched_tokens // FIRST_SIZE).bit_length()
    return [FIRST_SIZE << i for i in range(doublings)]


def idle_arrays(query_lens: Sequence[int], layout: CacheLayout) -> StepArrays:
    """Return a step that reads the cache's first block, and writes only states there.

    Args:
        query_lens: Tokens of each sequence, which has no earlier ones.
        layout: The cache's layout.
    """
    lengths = np.array(query_lens, np.int32)
    starts = np.concatenate([[0], lengths]).cumsum(dtype=np.int32)
    laid = np.full((2 + len(layout.groups), int(starts[-1])), -1)
    laid[:2] = 0
    count = len(query_lens)
    longest = max(query_lens)
    tables = [
        np.zeros((count, group.state_blocks or -(-longest // group.block_size)), np.int32)
        for group in layout.groups
    ]
    return StepArrays(laid, starts, lengths, lengths, np.zeros(count, np.int64), tables)
