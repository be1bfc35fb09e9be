"""PagedAttention on GPU: decodes and prefill chunks of any length, in one kernel.

A program serves one sequence, one KV head and a tile of query rows, where a row is
a (token, head of the group) pair: so the query heads that share a KV head share
each load of K and V, and even a decode fills the rows of a matrix product. It walks
the keys in tiles, finding each key's block through the block table (PagedAttention,
Kwon et al., SOSP 2023, section 4.1), with an online softmax in float32
(FlashAttention-2, Dao 2023, section 3.1), and skips the tiles that causality or the
window hide from all its rows.
"""

# Triton reads its kernels' source: types there are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.metadata import AttentionMetadata

_LOG2_E = 1.4426950408889634


@triton.jit
def _paged_attention_kernel(  # noqa: PLR0915, PLR0917
    query,
    key_cache,
    value_cache,
    out,
    query_starts,
    seq_lens,
    block_tables,
    alibi_slopes,  # or, where unused, anything
    scale,
    soft_cap,
    sliding_window,
    query_token_stride,
    query_head_stride,
    block_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads to a KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the next power of two to HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # query rows of a tile
    KEYS: tl.constexpr,  # keys of a tile
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    LOG2_E: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands are
):
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    if tile * ROWS < query_len * GROUP:
        row = tile * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        real_row = token < query_len
        position = seq_len - query_len + token
        dim = tl.arange(0, PADDED_DIM)
        real_dim = dim < HEAD_DIM
        flat_token = (query_start + token).to(tl.int64)
        from_query = flat_token * query_token_stride + head * query_head_stride
        q = tl.load(
            query + from_query[:, None] + dim[None, :],
            mask=real_row[:, None] & real_dim[None, :],
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + head, mask=real_row, other=0.0)

        # The keys that some row of this tile may see.
        first_position = seq_len - query_len + tile * ROWS // GROUP
        end = tl.minimum(seq_len - query_len + (tile * ROWS + ROWS - 1) // GROUP + 1, seq_len)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(first_position - sliding_window + 1, 0) // KEYS * KEYS

        # A finite start, so that a row which sees nothing of a tile makes no NaN.
        maximum = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        for tile_begin in range(begin, end, KEYS):
            key = tile_begin + tl.arange(0, KEYS)
            # Slots past the end may hold anything: they are never loaded.
            real_key = key < end
            block = tl.load(
                block_tables + seq.to(tl.int64) * table_stride + key // BLOCK_SIZE,
                mask=real_key,
                other=0,
            ).to(tl.int64)
            place = block * block_stride + (kv_head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
            k = tl.load(
                key_cache + place[None, :] + dim[:, None],
                mask=real_key[None, :] & real_dim[:, None],
                other=0.0,
            )
            # "ieee": float32 models get float32 products, not TF32.
            if UPCAST:
                k = k.to(tl.float32)
            logits = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_CAP:
                # tanh(x) is 2 * sigmoid(2x) - 1
                logits = soft_cap * (2.0 * tl.sigmoid(2.0 * (logits / soft_cap)) - 1.0)
            distance = key[None, :] - position[:, None]
            if HAS_ALIBI:
                logits += slope[:, None] * distance.to(tl.float32)
            seen = (distance <= 0) & real_key[None, :]
            if HAS_WINDOW:
                seen = seen & (distance > -sliding_window)
            logits = tl.where(seen, logits * LOG2_E, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.max(logits, 1))
            weights = tl.exp2(logits - new_maximum[:, None])
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(weights, 1)
            maximum = new_maximum
            v = tl.load(
                value_cache + place[:, None] + dim[None, :],
                mask=real_key[:, None] & real_dim[None, :],
                other=0.0,
            )
            weights = weights.to(v.dtype)
            if UPCAST:
                weights = weights.to(tl.float32)
                v = v.to(tl.float32)
            attended = attended * rescale[:, None]
            attended += tl.dot(weights, v, input_precision="ieee")

        # A row that may attend to nothing gives zeros.
        attended = attended / tl.where(total > 0, total, 1.0)[:, None]
        to = (flat_token * NUM_HEADS + head) * HEAD_DIM
        tl.store(
            out + to[:, None] + dim[None, :],
            attended.to(out.dtype.element_ty),
            mask=real_row[:, None] & real_dim[None, :],
        )


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
    """Attends over paged keys and values; see `kernels.ops.paged_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    group = num_heads // num_kv_heads
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    num_seqs = metadata.seq_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    # A matrix product takes 16 rows at least. Tiles shrink as heads grow, so that two
    # stages of them fit in the 99 KiB of shared memory that every GPU since 2020 has.
    head_bytes = head_dim * query.element_size()
    keys = 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
    rows = min(
        32 if head_bytes > 512 else 64, triton.next_power_of_2(metadata.max_query_len * group)
    )
    rows = max(16, rows)
    grid = (num_seqs, num_kv_heads, triton.cdiv(metadata.max_query_len * group, rows))
    _paged_attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        out,
        metadata.query_starts,
        metadata.seq_lens,
        metadata.block_tables,
        metadata.seq_lens if alibi_slopes is None else alibi_slopes.float().contiguous(),
        scale,
        soft_cap or 0.0,
        sliding_window or 0,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        metadata.block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        ROWS=rows,
        KEYS=keys,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        LOG2_E=_LOG2_E,
        # The interpreter would multiply the bits of a bfloat16 as an integer.
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2,
    )
    return out
