"""Launches the kernel of PagedAttention on a GPU; see `attention_kernel.py`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.triton.attention_kernel import paged_attention_kernel
from octavo.kernels.triton.merge_splits import merge_splits
from octavo.kernels.triton.plan import plan_of
from octavo.kernels.triton.splits import MIN_KEYS
from octavo.kernels.triton.tiles import WIDE, WIDE_WARP, Heads, WorkKind, choose_tiles
from octavo.kernels.triton.write_kv import spread_heads
from octavo.kernels.whole_numbers import SCALE_BYTES
from octavo.kernels.widths import width_of_values

_SMALL = 2048
"""Maximum rows times keys of a tile that needs at most 16 registers in four warps."""
_LOG2_E = 1.4426950408889634
_MERGED: dict[WorkKind, tuple[int, int]] = {"decode": (1, 32), "chunk": (8, 4)}
"""Rows and pieces that a program merges at a time: decodes have many pieces, chunks few."""
_WIDE_MERGED: dict[WorkKind, tuple[int, int]] = {"decode": (1, 8), "chunk": (2, 4)}
"""The same for values of more than 256 elements, since registers hold fewer of them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that all launches of a call share."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None
    out: Tensor
    metadata: AttentionMetadata
    heads: Heads
    factor: float
    value_scale: float
    sliding_window: int | None
    chunk: int | None
    soft_cap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


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
    if scale <= 0 or key_scale <= 0:
        raise ValueError(f"scales must be positive, not {scale} (logits) and {key_scale} (keys)")
    if key_cache.dtype == torch.int8:
        query = spread_heads(query, query.dtype)
    if query.stride(-1) != 1:
        query = query.contiguous()
    num_tokens, num_heads, key_dim = query.shape
    value_dim = width_of_values(key_cache, value_cache, value_dim)
    heads = Heads(num_heads // key_cache.shape[1], key_dim, value_dim, latent=value_cache is None)
    out = query.new_empty(num_tokens, num_heads, value_dim)
    if not len(query):
        return out
    plan = plan_of(metadata, query, key_cache, heads, sliding_window or chunk)
    call = _Call(
        query,
        key_cache,
        value_cache,
        out,
        metadata,
        heads,
        scale * key_scale,
        key_scale if value_cache is None else value_scale,
        sliding_window,
        chunk,
        soft_cap,
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
        None if sinks is None else sinks.float().contiguous(),
    )
    if plan.num_decode_items:
        items = plan.items[: plan.num_decode_items]
        _launch(call, "decode", items, plan.num_decode_pieces, plan.splits)
    if plan.num_decode_items < len(plan.items):
        items = plan.items[plan.num_decode_items :]
        _launch(call, "chunk", items, plan.num_chunk_pieces, plan.splits)
    return out


def _operands(dtype: torch.dtype, cache_dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the products' operands.

    For whole numbers it is that of queries, and for fp8 float16: an H100 converts two fp8 to
    float16 in one instruction, to bfloat16 in four.
    """
    if cache_dtype.is_floating_point and cache_dtype.itemsize == 1 and dtype.itemsize == 2:
        return tl.float16
    return getattr(tl, str(dtype).removeprefix("torch."))


def small_tile(gpu: Gpu) -> int:
    """Return the maximum rows times keys of a tile in which each (row, key) has its own sum.

    On AMD GPUs with warps of 32 threads, registers do not suffice, and a warp sees whole rows.
    """
    return 0 if gpu.is_amd and gpu.warp_size < WIDE_WARP else _SMALL


def merged_at_once(kind: WorkKind, heads: Heads) -> tuple[int, int]:
    """Return the numbers of rows and of pieces that a program merges at a time."""
    return (_MERGED if heads.padded_value <= WIDE else _WIDE_MERGED)[kind]


def _launch(call: _Call, kind: WorkKind, items: Tensor, pieces: int, splits: int | None) -> None:
    """Launch attention for `items`, of which the first `pieces` may be pieces of keys."""
    query, metadata, heads = call.query, call.metadata, call.heads
    _, num_kv_heads, block_size, _ = call.key_cache.shape
    dtypes = {"dtype": query.dtype, "cache_dtype": call.key_cache.dtype}
    where = describe_gpu(query.device)
    tiles = choose_tiles(kind, where, heads, **dtypes)
    span = call.sliding_window or call.chunk
    min_tiles = MIN_KEYS // tiles.keys if splits is None else 1
    partial_rows = min(tiles.rows, heads.group) if kind == "decode" else tiles.rows
    shape = (pieces, num_kv_heads, partial_rows)
    partial_lse = query.new_empty(shape, dtype=torch.float32)
    partial_out = query.new_empty((*shape, heads.value_dim), dtype=torch.float32)
    unused = metadata.seq_lens
    shared: dict[str, object] = {
        "items": items,
        "query_starts": metadata.query_starts,
        "seq_lens": metadata.seq_lens,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "sinks": unused if call.sinks is None else call.sinks,
        "span": span or 0,
        "NUM_HEADS": query.shape[1],
        "GROUP": heads.group,
        "VALUE_DIM": heads.value_dim,
        "PADDED_VALUE": heads.padded_value,
        "ROWS": tiles.rows,
        "PARTIAL_ROWS": partial_rows,
        "KEYS": tiles.keys,
        "MIN_TILES": min_tiles,
        "HAS_SPAN": span is not None,
        "CHUNKED": call.chunk is not None,
        "HAS_SINKS": call.sinks is not None,
        "LOG2_E": _LOG2_E,
    }
    # Without values the kernel reads none: any tensor will do.
    values = call.key_cache if call.value_cache is None else call.value_cache
    paged_attention_kernel[len(items), num_kv_heads](
        query=query,
        key_cache=call.key_cache,
        value_cache=values,
        out=call.out,
        block_tables=metadata.block_tables,
        alibi_slopes=unused if call.alibi_slopes is None else call.alibi_slopes,
        factor=call.factor,
        value_scale=call.value_scale,
        soft_cap=call.soft_cap or 0.0,
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        key_stride=call.key_cache.stride(0),
        value_stride=values.stride(0),
        table_stride=metadata.block_tables.stride(0),
        DTYPE=_operands(query.dtype, call.key_cache.dtype),
        KEY_DIM=heads.key_dim,
        MAIN=heads.main,
        PADDED_MAIN=heads.padded_main,
        PADDED_REST=heads.padded_rest,
        LATENT=heads.latent,
        SAME_PLACES=heads.key_dim == heads.value_dim
        and call.key_cache.stride(0) == values.stride(0),
        SCALE_BYTES=SCALE_BYTES if call.key_cache.dtype == torch.int8 else 0,
        BLOCK_SIZE=block_size,
        HAS_CAP=call.soft_cap is not None,
        HAS_ALIBI=call.alibi_slopes is not None,
        SMALL=small_tile(where),
        # The interpreter would multiply a bfloat16's bits as an integer.
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
        **shared,
    )
    if pieces:
        rows, at_once = merged_at_once(kind, heads)
        merge_splits[pieces, num_kv_heads, triton.cdiv(partial_rows, rows)](
            out=call.out, MERGED_ROWS=rows, PIECES=at_once, enable_fp_fusion=True, **shared
        )
