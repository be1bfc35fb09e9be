"""Attention on the CPU in plain PyTorch, for machines without a C++ compiler.

It gathers sequences with the same number of queries through their block tables into one padded
batch for `scaled_dot_product_attention`; all decodes of a step are one call. Each gather copies
K/V.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from octavo.kernels.cpu.fallback_draws import draw_tokens  # noqa: F401 - one of the operations
from octavo.kernels.low_rank import LowRankBatch, matrix_at
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.reference import round_for_cache
from octavo.kernels.scores import score_tokens  # noqa: F401 - one of the operations
from octavo.kernels.widths import width_of_values


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot; see `octavo.kernels.ops.write_kv`."""
    block_size = key_cache.shape[2]
    kept = None if bool((slot_mapping >= 0).all()) else slot_mapping >= 0
    slots = slot_mapping if kept is None else slot_mapping[kept]
    block, offset = slots // block_size, slots % block_size
    for x, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if x is not None and cache is not None:
            stored = round_for_cache(x if kept is None else x[kept], cache.dtype, scale)
            _raw(cache)[block, :, offset] = _raw(stored)


def _raw(x: Tensor) -> Tensor:
    """Return fp8 as bytes, since PyTorch cannot index it; else the tensor itself."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def rotate_and_write(  # noqa: PLR0917 - as in `octavo.kernels.ops`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values; see `octavo.kernels.ops`."""
    half = query.shape[-1] // 2
    # [num_tokens, 1, 1, half]: factors of both halves of every head.
    c, s = (angle[:, None, None, :half].float() for angle in (cos, sin))
    signed = torch.cat([-s, s], -2)

    def rotated(x: Tensor) -> Tensor:
        halves = x.float().view(*x.shape[:-1], 2, half)
        return torch.addcmul(halves * c, halves.flip(-2), signed).flatten(-2).to(x.dtype)

    scales = {"key_scale": key_scale, "value_scale": value_scale}
    write_kv(rotated(key), value, key_cache, value_cache, slot_mapping, **scales)
    return rotated(query)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute paged attention; see `octavo.kernels.ops.paged_attention`."""
    num_tokens, num_heads, _ = query.shape
    value_dim = width_of_values(key_cache, value_cache, value_dim)
    out = query.new_zeros(num_tokens, num_heads, value_dim)
    scale *= key_scale
    if value_cache is None:
        value_scale = key_scale
    starts = metadata.query_starts
    query_lens = (starts[1:] - starts[:-1]).where(metadata.seq_lens > 0, 0)
    for query_len in sorted(set(query_lens.tolist()) - {0}):
        seqs = torch.nonzero(query_lens == query_len).flatten()
        rows = starts[seqs, None] + torch.arange(query_len)
        seq_lens, tables = metadata.seq_lens[seqs].long(), metadata.block_tables[seqs]
        q = query[rows].transpose(1, 2)
        # [num_seqs, 1, query_len, 1]
        query_positions = (seq_lens[:, None] - query_len + torch.arange(query_len))[
            :, None, :, None
        ]
        first_seen = _first_seen(query_positions, sliding_window, chunk)
        begins = first_seen[:, 0, 0, 0]
        keys = _positions(begins, seq_lens, key_cache.shape[2])
        k = _gather(key_cache, tables, keys, begins, seq_lens).to(q.dtype)
        if value_cache is None:
            v = k[..., :value_dim]
        else:
            v = _gather(value_cache, tables, keys, begins, seq_lens).to(q.dtype)
        # [num_seqs, 1, query_len, keys]; negative where the key is earlier
        distance = keys[:, None, None] - query_positions
        seen = (distance <= 0) & (keys[:, None, None] >= first_seen)
        if soft_cap is None and alibi_slopes is None and sinks is None:
            attended = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        else:
            k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            logits = scale * q.float() @ k.transpose(2, 3)
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            if alibi_slopes is not None:
                logits = logits + alibi_slopes.float()[:, None, None] * distance
            logits = logits.masked_fill(~seen, -torch.inf)
            if sinks is not None:  # one more key, without a value
                logits = torch.cat([logits, _sink_logits(sinks, logits)], -1)
                v = F.pad(v, (0, 0, 0, 1))
            attended = logits.softmax(-1) @ v
        out[rows] = (attended * value_scale).transpose(1, 2).to(out.dtype)
    return out


def _first_seen(query_positions: Tensor, sliding_window: int | None, chunk: int | None) -> Tensor:
    """Return the first position that each query sees."""
    if sliding_window is not None:
        return (query_positions - sliding_window + 1).clamp(min=0)
    return (
        torch.zeros_like(query_positions)
        if chunk is None
        else query_positions - query_positions % chunk
    )


def _sink_logits(sinks: Tensor, logits: Tensor) -> Tensor:
    """Return each head's sink, `[num_seqs, num_heads, query_len, 1]`."""
    return sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)


def _positions(begins: Tensor, ends: Tensor, block_size: int) -> Tensor:
    """Return the positions to gather, `[num_seqs, n]`, from each sequence's first block on."""
    begins = begins - begins % block_size
    blocks = -(-int((ends - begins).max()) // block_size)
    return begins[:, None] + torch.arange(blocks * block_size)


def _gather(
    cache: Tensor, tables: Tensor, positions: Tensor, begins: Tensor, ends: Tensor
) -> Tensor:
    """Return keys or values at whole blocks of positions, `[num_seqs, num_kv_heads, n, dim]`.

    Positions outside a sequence are zeros. The mask is not enough there: NaN times zero is NaN.
    """
    block_size = cache.shape[2]
    places = (positions[:, ::block_size] // block_size).clamp(max=tables.shape[1] - 1)
    # Unused entries of block tables may be any number.
    used = tables.long().gather(1, places).clamp(0, cache.shape[0] - 1)
    gathered = _raw(cache)[used].transpose(1, 2).flatten(2, 3)
    unseen = (positions < begins[:, None]) | (positions >= ends[:, None])
    seen = gathered.masked_fill(unseen[:, None, :, None], 0)
    return seen.view(cache.dtype) if seen.dtype == torch.uint8 else seen


def argmax(rows: Tensor) -> Tensor:
    """Return the column of each row's greatest element; see `octavo.kernels.ops.argmax`."""
    return rows.max(dim=-1).indices  # torch.argmax takes twice as long


def mask_logits(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Make tokens impossible, in place; see `octavo.kernels.ops.mask_logits`."""
    bits = np.unpackbits((~masks).view(np.uint8), axis=1, bitorder="little").view(bool)
    width = min(bits.shape[1], logits.shape[1])
    for row, forbidden in zip(rows.tolist(), torch.from_numpy(bits[:, :width]), strict=True):
        logits[row, :width].masked_fill_(forbidden, -math.inf)
        logits[row, width:] = -math.inf


def add_low_rank(out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
    """Add low-rank products; see `octavo.kernels.ops.add_low_rank`."""
    records = batch.records[layer].tolist()
    for adapter, begin, end in batch.tiles.tolist():
        down, up, rank, bits = records[adapter]
        if not rank:
            continue
        rows = batch.rows[begin:end].long()
        inner = x[rows].float() @ matrix_at(down, (rank, x.shape[1]), x.dtype).float().t()
        product = inner @ matrix_at(up, (rank, out.shape[1]), x.dtype).float()
        out[rows] = (out[rows].float() + np.int64(bits).view(np.float64) * product).to(out.dtype)


def pin_threads(_: Sequence[Sequence[int]]) -> bool:
    """Return False: PyTorch cannot pin threads; see `NativeKernels.pin_threads`."""
    return False


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
    swap_blocks(cache, cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks between caches in CPU memory; see `octavo.kernels.ops.swap_blocks`."""
    copied = _raw(source).index_select(0, pairs[:, 0])
    _raw(destination).index_copy_(0, pairs[:, 1], copied)
