"""Attention on the CPU in plain PyTorch, for machines without a C++ compiler.

It gathers sequences with the same number of queries through their block tables into one padded
batch for `scaled_dot_product_attention`; so all decodes of a step are one call. Each gather copies
the K/V that it reads.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

from octavo.kernels.cpu.fallback_draws import draw_tokens  # noqa: F401 - one of the operations
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.scores import score_tokens  # noqa: F401 - likewise


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value to its slot; see `octavo.kernels.ops.write_kv`."""
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, :, offset] = key
    value_cache[block, :, offset] = value


def rotate_and_write(  # noqa: PLR0917 - as the others
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotate queries and keys, write keys and values; see `octavo.kernels.ops`."""
    half = query.shape[-1] // 2
    # [num_tokens, 1, 1, half], the factors of both halves of every head.
    c, s = (angle[:, None, None, :half].float() for angle in (cos, sin))
    signed = torch.cat([-s, s], -2)

    def rotated(x: Tensor) -> Tensor:
        halves = x.float().view(*x.shape[:-1], 2, half)
        return torch.addcmul(halves * c, halves.flip(-2), signed).flatten(-2).to(x.dtype)

    write_kv(rotated(key), value, key_cache, value_cache, slot_mapping)
    return rotated(query)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute paged attention; see `octavo.kernels.ops.paged_attention`."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = metadata.query_starts
    query_lens = (starts[1:] - starts[:-1]).where(metadata.seq_lens > 0, 0)
    for query_len in sorted(set(query_lens.tolist()) - {0}):
        seqs = torch.nonzero(query_lens == query_len).flatten()
        rows = starts[seqs, None] + torch.arange(query_len)
        seq_lens = metadata.seq_lens[seqs]
        max_len = int(seq_lens.max())
        q = query[rows].transpose(1, 2)
        k = _gather(key_cache, metadata.block_tables[seqs], seq_lens, max_len)
        v = _gather(value_cache, metadata.block_tables[seqs], seq_lens, max_len)
        query_positions = seq_lens[:, None] - query_len + torch.arange(query_len)
        # [num_seqs, 1, query_len, max_len], negative where the key is earlier.
        distance = (torch.arange(max_len) - query_positions[:, :, None])[:, None]
        seen = distance <= 0
        if sliding_window is not None:
            seen &= distance > -sliding_window
        if soft_cap is None and alibi_slopes is None:
            attended = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        else:
            k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            logits = scale * q.float() @ k.transpose(2, 3)
            if soft_cap is not None:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            if alibi_slopes is not None:
                logits = logits + alibi_slopes.float()[:, None, None] * distance
            attended = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        out[rows] = attended.transpose(1, 2).to(out.dtype)
    return out


def _gather(cache: Tensor, tables: Tensor, seq_lens: Tensor, max_len: int) -> Tensor:
    """Return `[num_seqs, num_kv_heads, max_len, head_dim]`, with zeros past each sequence's end.

    The mask is not enough there: NaN times a weight of zero is NaN.
    """
    used = tables[:, : -(-max_len // cache.shape[2])].long()
    # The padding of block tables may be any number.
    used = used.clamp(0, cache.shape[0] - 1)
    gathered = cache[used].transpose(1, 2).flatten(2, 3)[:, :, :max_len]
    past_end = torch.arange(max_len) >= seq_lens[:, None]
    return gathered.masked_fill(past_end[:, None, :, None], 0)


def argmax(rows: Tensor) -> Tensor:
    """Return the column of each row's greatest element; see `octavo.kernels.ops.argmax`."""
    return rows.max(dim=-1).indices  # torch.argmax takes twice as long


def pin_threads(_: Sequence[Sequence[int]]) -> bool:
    """Return False: PyTorch cannot pin threads; see `NativeKernels.pin_threads`."""
    return False


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
    swap_blocks(cache, cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks between caches in CPU memory; see `octavo.kernels.ops.swap_blocks`."""
    destination.index_copy_(0, pairs[:, 1], source.index_select(0, pairs[:, 0]))
