"""Splits a batch's attention among Triton programs, on the host, once per step."""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.host_copies import to_device
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan, AttentionShape
from octavo.kernels.triton.splits import choose_splits, max_pieces
from octavo.kernels.triton.tiles import Heads, Tiles, WorkKind, choose_tiles, count_resident


@dataclass(frozen=True, slots=True)
class _Attention:
    """The properties, besides the batch, that determine tiles and pieces."""

    heads: Heads
    num_kv_heads: int
    span: int | None
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, shape: AttentionShape) -> "_Attention":
        """Return those of layers of a shape."""
        heads = Heads(
            shape.num_heads // shape.num_kv_heads, shape.key_dim, shape.value_dim, shape.latent
        )
        return cls(
            heads, shape.num_kv_heads, shape.span, shape.dtype, shape.cache_dtype, shape.device
        )

    def tiles(self, kind: WorkKind) -> Tiles:
        """Return the tile sizes for a kind of work."""
        gpu = describe_gpu(self.device)
        return choose_tiles(kind, gpu, self.heads, dtype=self.dtype, cache_dtype=self.cache_dtype)

    def concurrent(self, kind: WorkKind) -> int:
        """Return the number of programs of a kind that the GPU runs concurrently."""
        gpu = describe_gpu(self.device)
        resident = count_resident(
            self.tiles(kind), gpu, self.heads, dtype=self.dtype, cache_dtype=self.cache_dtype
        )
        return resident * gpu.multiprocessors

    def splits(self, kind: WorkKind, lengths: np.ndarray) -> np.ndarray:
        """Return the number of pieces of each tile's keys, `[num_tiles]`.

        Args:
            kind: The kind of work.
            lengths: `[num_tiles]`, the tokens of each tile's sequence.
        """
        seen = lengths if self.span is None else np.minimum(lengths, self.span)
        return choose_splits(seen, self.num_kv_heads, self.concurrent(kind), kind)


def plan_attention(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    shape: AttentionShape,
    splits: int | None = None,
) -> AttentionPlan:
    """Return a batch's plan; see `octavo.kernels.ops.plan_attention`."""
    return _plan(query_lens, seq_lens, _Attention.of(shape), splits)


def _plan(
    query_lens: np.ndarray, seq_lens: np.ndarray, attention: _Attention, splits: int | None
) -> AttentionPlan:
    items_by_kind: list[np.ndarray] = []
    pieces: list[int] = []
    kinds: dict[WorkKind, np.ndarray] = {"decode": query_lens == 1, "chunk": query_lens > 1}
    for kind, chosen in kinds.items():
        seqs = np.flatnonzero(chosen)
        rows = query_lens[seqs] * attention.heads.group
        tiles = _tiles_of(seqs, rows, attention.tiles(kind).rows)
        if splits is None:
            counts = attention.splits(kind, seq_lens[tiles[:, 0]])
        else:
            counts = np.full(len(tiles), splits, np.int32)
        items_by_kind.append(_cut(tiles, counts))
        pieces.append(int(counts[counts > 1].sum()))
    items = np.concatenate(items_by_kind)
    decode_pieces, chunk_pieces = pieces
    return AttentionPlan(
        to_device(items, attention.device),
        len(items_by_kind[0]),
        decode_pieces,
        chunk_pieces,
        splits,
        int(items[:, 3].max(initial=1)),
    )


def plan_room(sequences: int, chunks: int, rows: int, shape: AttentionShape) -> AttentionPlan:
    """Return a plan with room for any batch; see `octavo.kernels.ops.plan_room`."""
    attention = _Attention.of(shape)
    heads = attention.heads
    kinds: tuple[WorkKind, ...] = ("decode", "chunk")
    decode_pieces, chunk_pieces = (
        max_pieces(kind, shape.num_kv_heads, attention.concurrent(kind)) for kind in kinds
    )
    per_decode = -(-heads.group // attention.tiles("decode").rows)
    decode_items = max(sequences * per_decode, decode_pieces)
    # The dummy sequence's tiles, and at most one partial tile of each other sequence.
    full = -(-rows * heads.group // attention.tiles("chunk").rows)
    chunk_items = full + max(chunks, chunk_pieces)
    idle = np.zeros((decode_items + chunk_items, 4), np.int32)
    idle[:, 0], idle[:, 3] = sequences, 1
    idle[:decode_items, 1] = np.arange(decode_items)
    idle[decode_items:, 1] = np.arange(chunk_items)
    return AttentionPlan(to_device(idle, shape.device), decode_items, decode_pieces, chunk_pieces)


def _cut(tiles: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `[counts.sum(), 4]` int32, an item for each piece of each tile's keys.

    Tiles of several pieces come first.
    """
    order = np.argsort(counts == 1, kind="stable")
    tiles, counts = tiles[order], counts[order]
    ends = np.cumsum(counts)
    items = np.empty((counts.sum(), 4), np.int32)
    items[:, :2] = np.repeat(tiles, counts, axis=0)
    items[:, 2] = np.arange(len(items)) - np.repeat(ends - counts, counts)
    items[:, 3] = np.repeat(counts, counts)
    return items


def _tiles_of(seqs: np.ndarray, rows: np.ndarray, tile_rows: int) -> np.ndarray:
    """Return `[num_tiles, 2]` int32 of (sequence, tile), each sequence's last (longest) first."""
    counts = -(-rows // tile_rows)
    ends = np.cumsum(counts)
    tile = np.repeat(ends, counts) - 1 - np.arange(ends[-1] if len(ends) else 0)
    return np.stack([np.repeat(seqs, counts), tile], 1).astype(np.int32)


def plan_of(
    metadata: AttentionMetadata,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    heads: Heads,
    span: int | None,
) -> AttentionPlan:
    """Return the batch's plan; if it has none, make one: then the host waits for the GPU."""
    if metadata.plan is not None:
        return metadata.plan
    shape = heads, key_cache.shape[1], span
    return _plan(
        metadata.query_starts.diff().cpu().numpy(),
        metadata.seq_lens.cpu().numpy(),
        _Attention(*shape, query.dtype, key_cache.dtype, query.device),
        None,
    )
