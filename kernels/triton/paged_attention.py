"""PagedAttention on a GPU: one kernel for decodes and for prompt chunks.

A program computes one tile of a sequence's query rows, for one KV head and one piece of the keys. A
row is a (token, head of the group) pair: the query heads of a KV head share each load of K and V,
and even a decode fills the rows of a matrix product. The plan lists the tiles, so that every
program has work: decodes are tiles of few rows, prompt chunks tiles of many, each in their own
launch. Keys are read in tiles through the block table (PagedAttention, Kwon et al., SOSP 2023,
section 4.1), with an online softmax in float32 (FlashAttention-2, Dao 2023, section 3.1). Tiles
hidden by causality or the window are skipped; only those partly hidden are masked.

If there are too few sequences to fill the GPU, several programs split their keys (Flash-Decoding,
Dao et al. 2023), and merge_splits.py merges the results.
"""

# Triton compiles its kernels' source, where types are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.triton.merge_splits import merge_splits
from octavo.kernels.triton.plan import plan_of
from octavo.kernels.triton.shares import share_of
from octavo.kernels.triton.splits import LEAST_KEYS, choose_splits
from octavo.kernels.triton.tiles import WIDE_WARP, Kind, choose_tiles, count_resident

_SMALL = 2048
"""A tile of at most this many rows times keys needs at most 16 registers in four warps."""
_LOG2_E = 1.4426950408889634
_MERGED: dict[Kind, tuple[int, int]] = {"decode": (1, 32), "chunk": (8, 4)}
"""Rows and pieces that a program merges at a time: decodes have many pieces, chunks few."""
# Arguments that change between steps must not compile another variant.
_VARYING = ["items", "partial_out", "partial_lse", "table_stride", "sliding_window", "splits"]


@triton.jit
def _blocks_of(table, tile_begin, end, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the block of each key of a tile, or one for all if a block holds whole tiles.

    Tiles begin at multiples of their size, so a key's offset in its block, and its block's distance
    from the tile's first, are the same in each tile.
    """
    if BLOCK_SIZE >= KEYS:
        # Past the end, read the last block again: nothing beyond the table may be read.
        block = tl.load(table + tl.maximum(tl.minimum(tile_begin, end - 1), 0) // BLOCK_SIZE)
    else:
        local = tl.arange(0, KEYS)
        first = table + tile_begin // BLOCK_SIZE
        block = tl.load(first + local // BLOCK_SIZE, mask=local < end - tile_begin, other=0)
    return block.to(tl.uint32)  # so that a 32-bit product addresses it, not a 64-bit one


@triton.jit
def _fetch(  # noqa: PLR0917
    cache, place, real_key, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr
):
    """Load keys or values from a head's cache."""
    dim = tl.arange(0, PADDED_DIM)
    real_dim = dim < HEAD_DIM
    from_cache = cache + place[:, None] + dim[None, :]
    if MASKED:
        # Slots past the end may hold anything, so they are not loaded.
        tile = tl.load(from_cache, mask=real_key[:, None] & real_dim[None, :], other=0.0)
    elif PADDED_DIM > HEAD_DIM:
        tile = tl.load(from_cache, mask=real_dim[None, :], other=0.0)
    else:
        tile = tl.load(from_cache)
    return tile


@triton.jit
def _cuts(  # noqa: PLR0917
    begin,
    end,
    context,
    first_row,
    seq_len,
    sliding_window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return where keys begin, where those seen by all rows begin and end, and where keys end."""
    # All rows see keys up to the first row's position and within the last row's window.
    clear_end = (context + first_row // GROUP + 1) // KEYS * KEYS
    clear_begin = begin
    if HAS_WINDOW:
        last = tl.minimum(context + (first_row + ROWS - 1) // GROUP, seq_len - 1)
        clear_begin = tl.cdiv(tl.maximum(last - sliding_window + 1, 0), KEYS) * KEYS
        clear_begin = tl.minimum(tl.maximum(clear_begin, begin), end)
    clear_end = tl.minimum(tl.maximum(clear_end, clear_begin), end)
    return begin, clear_begin, clear_end, end


@triton.jit
def _queries(from_queries, real, factor, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Return rows of queries as operands of products, and the factor of each row's products."""
    q = tl.load(from_queries, mask=real, other=0.0)
    factors = tl.full([q.shape[0]], factor, tl.float32)
    if q.dtype != DTYPE:
        # float16 has a small range, so each row is scaled to a maximum of 1.
        q = q.to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        largest = tl.where(largest > 0, largest, 1.0)
        q = (q / largest[:, None]).to(DTYPE)
        factors *= largest
    if UPCAST:
        q = q.to(tl.float32)
    return q, factors


@triton.jit
def _walk(  # noqa: PLR0917
    maximum,
    total,
    attended,
    begin,
    end,
    q,
    position,
    slope,
    factor,
    key_cache,
    value_cache,
    table,
    soft_cap,
    sliding_window,
    block_stride,
    DTYPE: tl.constexpr,  # of the products' operands
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # some rows do not see some of the keys
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    LOG2_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to the keys from `begin` to `end`; return the softmax's new state."""
    # Blocks are loaded one tile ahead: in the same iteration as the loads of K and V that depend on
    # them, the pipeline could not prefetch these.
    block = _blocks_of(table, begin, end, KEYS, BLOCK_SIZE)
    for tile_begin in range(begin, end, KEYS):
        key = tile_begin + tl.arange(0, KEYS)
        slot = tl.arange(0, KEYS) % BLOCK_SIZE
        if BLOCK_SIZE > KEYS:
            slot += tile_begin % BLOCK_SIZE
        place = block.to(tl.int64) * block_stride + slot * HEAD_DIM
        block = _blocks_of(table, tile_begin + KEYS, end, KEYS, BLOCK_SIZE)
        real_key = key < end
        # Keys are loaded like values, from the same offsets; the product transposes them.
        k = _fetch(key_cache, place, real_key, HEAD_DIM, PADDED_DIM, MASKED)
        v = _fetch(value_cache, place, real_key, HEAD_DIM, PADDED_DIM, MASKED)

        # "ieee": float32 models get float32 products, not TF32.
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        to_log2 = factor * LOG2_E
        if HAS_CAP or HAS_ALIBI:
            logits *= factor[:, None]
            to_log2 = tl.full(factor.shape, LOG2_E, tl.float32)
        if HAS_CAP:
            # tanh(x) is 2 * sigmoid(2x) - 1
            logits = soft_cap * (2.0 * tl.sigmoid(2.0 * (logits / soft_cap)) - 1.0)
        distance = key[None, :] - position[:, None]
        if HAS_ALIBI:
            logits += slope[:, None] * distance.to(tl.float32)
        if MASKED:
            seen = (distance <= 0) & real_key[None, :]
            if HAS_WINDOW:
                seen = seen & (distance > -sliding_window)
            logits = tl.where(seen, logits, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * to_log2)
        weights = tl.exp2(logits * to_log2[:, None] - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        if len(total.shape) == 2:
            total = total * rescale[:, None] + weights
        else:
            total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        weights = weights.to(DTYPE)
        v = v.to(DTYPE)
        if UPCAST:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        attended = attended * rescale[:, None]
        attended = tl.dot(weights, v, attended, input_precision="ieee")
    return maximum, total, attended


@triton.jit(do_not_specialize=_VARYING)
def _paged_attention_kernel(  # noqa: PLR0917
    query,
    key_cache,
    value_cache,
    out,
    partial_out,  # results of programs that split keys: see merge_splits.py
    partial_lse,
    items,
    query_starts,
    seq_lens,
    block_tables,
    alibi_slopes,  # any tensor if unused
    factor,  # of the products, positive: the logits' scale times the keys' scale
    value_scale,  # factor of the values
    soft_cap,
    sliding_window,
    splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    table_stride,
    DTYPE: tl.constexpr,  # of the products' operands
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the next power of two to HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # query rows per tile
    PARTIAL_ROWS: tl.constexpr,  # rows of a tile that may be real
    KEYS: tl.constexpr,  # keys per tile
    LEAST_TILES: tl.constexpr,  # tiles of keys per piece
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    LOG2_E: tl.constexpr,
    SMALL: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq, query_start, query_len, seq_len, first_row, begin, end, piece, pieces = share_of(
        items, item, query_starts, seq_lens, sliding_window, splits,
        GROUP, ROWS, KEYS, LEAST_TILES, HAS_WINDOW,
    )  # fmt: skip
    # If there are no keys at all, the first program writes zeros.
    if split < tl.maximum(pieces, 1):
        local = tl.arange(0, ROWS)
        row = first_row + local
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        real_row = token < query_len
        context = seq_len - query_len
        position = context + token
        dim = tl.arange(0, PADDED_DIM)
        flat_token = (query_start + token).to(tl.int64)
        from_query = flat_token * query_token_stride + head * query_head_stride
        real = real_row[:, None] & (dim < HEAD_DIM)[None, :]
        from_queries = query + from_query[:, None] + dim[None, :]
        q, factors = _queries(from_queries, real, factor, DTYPE, UPCAST)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + head, mask=real_row, other=0.0)
        table = block_tables + seq.to(tl.int64) * table_stride
        from_head = kv_head * (BLOCK_SIZE * HEAD_DIM)

        begin += split * piece * KEYS
        end = tl.minimum(begin + piece * KEYS, end)
        cuts = _cuts(
            begin, end, context, first_row, seq_len, sliding_window, GROUP, ROWS, KEYS, HAS_WINDOW
        )
        # Starts finite, so that a row that sees no key of a tile gives no NaN.
        maximum = tl.full([ROWS], -1e30, tl.float32)
        # In small tiles each (row, key) has its own sum, and these are added at the end: adding
        # them for each tile would synchronize the warps.
        spread: tl.constexpr = ROWS * KEYS <= SMALL
        total = tl.zeros([ROWS, KEYS] if spread else [ROWS], tl.float32)
        attended = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        # Without a window, all rows see the first keys.
        for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
            maximum, total, attended = _walk(
                maximum, total, attended, cuts[part], cuts[part + 1], q, position, slope, factors,
                key_cache + from_head, value_cache + from_head, table,
                soft_cap, sliding_window, block_stride,
                DTYPE, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, part != 1,
                HAS_WINDOW, HAS_CAP, HAS_ALIBI, LOG2_E, UPCAST,
            )  # fmt: skip

        if spread:
            total = tl.sum(total, 1)
        # A row that attends to no key gives zeros.
        divisor = tl.where(total > 0, total, 1.0)
        attended *= (value_scale / divisor)[:, None]
        if pieces > 1:
            place = (item * tl.num_programs(1) + kv_head).to(tl.int64) * splits + split
            place = place * PARTIAL_ROWS + local
            lse = tl.where(total > 0, maximum + tl.log2(divisor), float("-inf"))
            tl.store(partial_lse + place, lse, mask=real_row)
            tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], attended, mask=real)
        else:
            to = (flat_token * NUM_HEADS + head) * HEAD_DIM
            rounded = attended.to(out.dtype.element_ty)
            tl.store(out + to[:, None] + dim[None, :], rounded, mask=real)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments that a call's launches share."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    metadata: AttentionMetadata
    factor: float
    value_scale: float
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: Tensor | None


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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute paged attention; see `octavo.kernels.ops.paged_attention`."""
    if scale <= 0 or key_scale <= 0:
        raise ValueError(f"scales must be positive, not {scale} (logits) and {key_scale} (keys)")
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not len(query):
        return out
    plan = plan_of(metadata, query, key_cache)
    call = _Call(
        query,
        key_cache,
        value_cache,
        out,
        metadata,
        scale * key_scale,
        value_scale,
        sliding_window,
        soft_cap,
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
    )
    if plan.num_decode_items:
        items = plan.items[: plan.num_decode_items]
        _launch(call, "decode", items, plan.longest_decode, plan.splits)
    if plan.num_decode_items < len(plan.items):
        items = plan.items[plan.num_decode_items :]
        _launch(call, "chunk", items, plan.longest_chunk, plan.splits)
    return out


def _operands(dtype: torch.dtype, cache_dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of the products' operands.

    For fp8 this is float16: an H100 converts two fp8 to float16 in one instruction, to bfloat16 in
    four.
    """
    if cache_dtype.itemsize == 1 and dtype.itemsize == 2:
        return tl.float16
    return getattr(tl, str(dtype).removeprefix("torch."))


def small_tile(gpu: Gpu) -> int:
    """Return the most rows times keys of a tile in which each (row, key) has its own sum.

    An AMD GPU with warps of 32 threads has no registers for that, and its warps see whole rows.
    """
    return 0 if gpu.is_amd and gpu.warp_size < WIDE_WARP else _SMALL


def _launch(call: _Call, kind: Kind, items: Tensor, longest: int, splits: int | None) -> None:
    """Launch attention for `items`, the longest of which has `longest` keys."""
    query, metadata = call.query, call.metadata
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = call.key_cache.shape
    group = num_heads // num_kv_heads
    where = describe_gpu(query.device)
    tiles = choose_tiles(
        kind,
        where,
        group=group,
        head_dim=head_dim,
        dtype=query.dtype,
        cache_dtype=call.key_cache.dtype,
    )
    seen = min(longest, call.sliding_window or longest)
    least_tiles = LEAST_KEYS // tiles.keys if splits is None else 1
    if splits is None:
        resident = count_resident(
            tiles,
            where,
            head_dim=head_dim,
            dtype=query.dtype,
            cache_dtype=call.key_cache.dtype,
        )
        programs = len(items) * num_kv_heads
        splits = choose_splits(programs, seen, resident * where.multiprocessors)
    partial_rows = min(tiles.rows, group) if kind == "decode" else tiles.rows
    shape = (len(items), num_kv_heads, splits if splits > 1 else 0, partial_rows)
    partial_lse = query.new_empty(shape, dtype=torch.float32)
    partial_out = query.new_empty((*shape, head_dim), dtype=torch.float32)
    shared: dict[str, object] = {
        "items": items,
        "query_starts": metadata.query_starts,
        "seq_lens": metadata.seq_lens,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "sliding_window": call.sliding_window or 0,
        "splits": splits,
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "ROWS": tiles.rows,
        "PARTIAL_ROWS": partial_rows,
        "KEYS": tiles.keys,
        "LEAST_TILES": least_tiles,
        "HAS_WINDOW": call.sliding_window is not None,
    }
    _paged_attention_kernel[len(items), num_kv_heads, splits](
        query=query,
        key_cache=call.key_cache,
        value_cache=call.value_cache,
        out=call.out,
        block_tables=metadata.block_tables,
        alibi_slopes=metadata.seq_lens if call.alibi_slopes is None else call.alibi_slopes,
        factor=call.factor,
        value_scale=call.value_scale,
        soft_cap=call.soft_cap or 0.0,
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        block_stride=call.key_cache.stride(0),
        table_stride=metadata.block_tables.stride(0),
        DTYPE=_operands(query.dtype, call.key_cache.dtype),
        BLOCK_SIZE=block_size,
        HAS_CAP=call.soft_cap is not None,
        HAS_ALIBI=call.alibi_slopes is not None,
        LOG2_E=_LOG2_E,
        SMALL=small_tile(where),
        # The interpreter would multiply a bfloat16's bits as an integer.
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
        **shared,
    )
    if splits > 1:
        rows, pieces = _MERGED[kind]
        merge_splits[len(items), num_kv_heads, triton.cdiv(partial_rows, rows)](
            out=call.out, MERGED_ROWS=rows, PIECES=pieces, enable_fp_fusion=True, **shared
        )
