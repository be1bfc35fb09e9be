"""PagedAttention on a GPU: one kernel for decodes and for prompt chunks.

A program computes one tile of a sequence's query rows, for one KV head and one piece of the keys. A
row is a (token, head of the group) pair: the query heads of a KV head share each load of K and V,
and even a decode fills the rows of a matrix product. The plan lists the tiles, so that every
program has work. Decodes are tiles of few rows and prompt chunks tiles of many; each kind has its
own launch. Keys are read in tiles through the block table (PagedAttention, Kwon et al., SOSP 2023,
section 4.1), with an online softmax in float32 (FlashAttention-2, Dao 2023, section 3.1). Tiles
hidden by causality or the window are skipped; only those partly hidden are masked.

In latent attention (DeepSeek-V2, 2024, section 2.1.2, with absorbed products) a tile of keys is
loaded once: its first elements are the values. Keys whose width is far from a power of two are
multiplied in two parts, to pad little.

If there are too few sequences to fill the GPU, several programs split their keys (Flash-Decoding,
Dao et al. 2023), and merge_splits.py merges the results. Tiles and pieces are the plan's items, in
memory, with one program each: so a CUDA graph with room for the maximum number of items serves any
batch.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton.merge_splits import add_sink
from octavo.kernels.triton.shares import first_seen, share_of

# Arguments that change between steps must not compile another variant.
_VARYING = ["items", "partial_out", "partial_lse", "table_stride", "span"]


@triton.jit
def _blocks_of(table, tile_begin, end, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the block of each key of a tile; one for all if a block holds whole tiles.

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
    return block.to(tl.uint32)  # so that addresses are 32-bit products, not 64-bit


@triton.jit
def _fetch(  # noqa: PLR0917
    cache, place, real_key, DIM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
):
    """Load `DIM` elements of keys or values from a head's cache."""
    dim = tl.arange(0, PADDED)
    real_dim = dim < DIM
    from_cache = cache + place[:, None] + dim[None, :]
    if MASKED:
        # Slots that no row sees may hold anything, so they are not loaded.
        tile = tl.load(from_cache, mask=real_key[:, None] & real_dim[None, :], other=0.0)
    elif PADDED > DIM:
        tile = tl.load(from_cache, mask=real_dim[None, :], other=0.0)
    else:
        tile = tl.load(from_cache)
    return tile


@triton.jit
def _scaled(  # noqa: PLR0917
    tile,
    cache,
    place,
    slot,
    real_key,
    DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Multiply a tile by the scales of keys or values in codes; other caches have none.

    They lie behind the codes of a block's head.
    """
    if SCALE_BYTES > 0:
        first = place - slot * DIM + BLOCK_SIZE * DIM
        from_cache = (cache + first + slot * SCALE_BYTES).to(tl.pointer_type(tl.bfloat16))
        tile *= tl.load(from_cache, mask=real_key, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _cuts(  # noqa: PLR0917
    begin,
    end,
    context,
    first_row,
    seq_len,
    span,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Return the keys' begin, the begin and end of those that all rows see, and the keys' end."""
    # All rows see the keys from the first that the last row sees to the first row's position.
    clear_end = (context + first_row // GROUP + 1) // KEYS * KEYS
    clear_begin = begin
    if HAS_SPAN:
        last = tl.minimum(context + (first_row + ROWS - 1) // GROUP, seq_len - 1)
        clear_begin = tl.cdiv(first_seen(last, span, CHUNKED), KEYS) * KEYS
        clear_begin = tl.minimum(tl.maximum(clear_begin, begin), end)
    clear_end = tl.minimum(tl.maximum(clear_end, clear_begin), end)
    return begin, clear_begin, clear_end, end


@triton.jit
def _queries(  # noqa: PLR0917
    queries,
    real_row,
    factor,
    MAIN: tl.constexpr,
    PADDED_MAIN: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return query rows as operands of both products, and the factor of each row's products.

    Without a second part, both operands are the same.
    """
    dim = tl.arange(0, PADDED_MAIN)
    real = real_row[:, None] & (dim < MAIN)[None, :]
    q = tl.load(queries[:, None] + dim[None, :], mask=real, other=0.0)
    rest = q
    if REST > 0:
        dim = tl.arange(0, PADDED_REST)
        real = real_row[:, None] & (dim < REST)[None, :]
        rest = tl.load(queries[:, None] + MAIN + dim[None, :], mask=real, other=0.0)
    factors = tl.full([q.shape[0]], factor, tl.float32)
    if q.dtype != DTYPE:
        # float16 has a small range, so each row is scaled to a maximum of 1.
        q, rest = q.to(tl.float32), rest.to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        largest = tl.where(largest > 0, largest, 1.0)
        q, rest = (q / largest[:, None]).to(DTYPE), (rest / largest[:, None]).to(DTYPE)
        factors *= largest
    if UPCAST:
        q, rest = q.to(tl.float32), rest.to(tl.float32)
    return q, rest, factors


@triton.jit
def _logits(  # noqa: PLR0917
    products,
    key,
    real_key,
    position,
    slope,
    factor,
    soft_cap,
    span,
    MASKED: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Return logits (-inf where masked), and the factors that scale them for `exp2`."""
    logits = products
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
        if HAS_SPAN:
            seen = seen & (key[None, :] >= first_seen(position, span, CHUNKED)[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    return logits, to_log2


@triton.jit
def _walk(  # noqa: PLR0917
    maximum,
    total,
    attended,
    begin,
    end,
    first_key,  # the first that any row sees
    q,
    q_rest,
    position,
    slope,
    factor,
    key_cache,
    value_cache,
    table,
    soft_cap,
    span,
    key_stride,
    value_stride,
    DTYPE: tl.constexpr,  # of the products' operands
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    PADDED_MAIN: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    SAME_PLACES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # some rows do not see some of the keys
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    LOG2_E: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to the keys from `begin` to `end`; return the softmax's new state."""
    # Block numbers are loaded one tile ahead: if K and V depended on a load in the same iteration,
    # the pipeline could not prefetch them.
    block = _blocks_of(table, begin, end, KEYS, BLOCK_SIZE)
    for tile_begin in range(begin, end, KEYS):
        key = tile_begin + tl.arange(0, KEYS)
        slot = tl.arange(0, KEYS) % BLOCK_SIZE
        if BLOCK_SIZE > KEYS:
            slot += tile_begin % BLOCK_SIZE
        place = block.to(tl.int64) * key_stride + slot * KEY_DIM
        value_place = place
        if not SAME_PLACES:
            value_place = block.to(tl.int64) * value_stride + slot * VALUE_DIM
        block = _blocks_of(table, tile_begin + KEYS, end, KEYS, BLOCK_SIZE)
        real_key = key < end
        if HAS_SPAN:
            real_key = real_key & (key >= first_key)
        # Keys are loaded like values; the product transposes them.
        k = _fetch(key_cache, place, real_key, MAIN, PADDED_MAIN, MASKED)
        if LATENT:
            v = k
        else:
            v = _fetch(value_cache, value_place, real_key, VALUE_DIM, PADDED_VALUE, MASKED)

        # "ieee": float32 models get float32 products, not TF32.
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if KEY_DIM > MAIN:
            rest = _fetch(key_cache + MAIN, place, real_key, KEY_DIM - MAIN, PADDED_REST, MASKED)
            rest = tl.trans(rest.to(q.dtype))
            products = tl.dot(q_rest, rest, products, input_precision="ieee")
        products = _scaled(
            products, key_cache, place, slot, real_key, KEY_DIM, SCALE_BYTES, BLOCK_SIZE
        )
        logits, to_log2 = _logits(
            products, key, real_key, position, slope, factor, soft_cap, span,
            MASKED, HAS_SPAN, CHUNKED, HAS_CAP, HAS_ALIBI, LOG2_E,
        )  # fmt: skip
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * to_log2)
        weights = tl.exp2(logits * to_log2[:, None] - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        if len(total.shape) == 2:
            total = total * rescale[:, None] + weights
        else:
            total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        weights = _scaled(
            weights, value_cache, value_place, slot, real_key, VALUE_DIM, SCALE_BYTES, BLOCK_SIZE
        ).to(DTYPE)
        if UPCAST:
            weights = weights.to(tl.float32)
        v = v.to(weights.dtype)
        attended = attended * rescale[:, None]
        attended = tl.dot(weights, v, attended, input_precision="ieee")
    return maximum, total, attended


@triton.jit
def _weigh(  # noqa: PLR0917
    maximum,
    total,
    sinks,
    real,
    value_scale,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Return the factors of rows' sums, and the base-2 logarithms of their softmax denominators."""
    factor = value_scale
    if HAS_SINKS:
        sink = tl.load(sinks, mask=real, other=float("-inf")) * LOG2_E
        total, share, maximum = add_sink(maximum, total, sink)
        factor *= share
    # A row that sees no key gives zeros.
    divisor = tl.where(total > 0, total, 1.0)
    return factor / divisor, tl.where(total > 0, maximum + tl.log2(divisor), float("-inf"))


@triton.jit(do_not_specialize=_VARYING)
def paged_attention_kernel(  # noqa: PLR0917
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
    sinks,  # any tensor if unused
    factor,  # positive factor of the products: the logits' scale times the keys' scale
    value_scale,  # factor of the values
    soft_cap,
    span,  # keys of a window or a chunk
    query_token_stride,
    query_head_stride,
    key_stride,  # between blocks
    value_stride,
    table_stride,
    DTYPE: tl.constexpr,  # of the products' operands
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,  # elements of a key in the first part; see tiles.py
    PADDED_MAIN: tl.constexpr,  # next powers of two
    PADDED_REST: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    LATENT: tl.constexpr,  # a key's first part is its value
    SAME_PLACES: tl.constexpr,  # values are at their keys' offsets
    SCALE_BYTES: tl.constexpr,  # of a token's key or value in codes; 0 in other caches
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # query rows per tile
    PARTIAL_ROWS: tl.constexpr,  # maximum rows of a tile that are not padding
    KEYS: tl.constexpr,  # keys per tile
    MIN_TILES: tl.constexpr,  # tiles of keys per piece
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,  # `span` is of a chunk, not of a window
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr,
    SMALL: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    """Attend for one item of the plan: a tile of query rows and a piece of the keys."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, query_start, query_len, seq_len, first_row, begin, end, piece, pieces, split = share_of(
        items, item, query_starts, seq_lens, span,
        GROUP, ROWS, KEYS, MIN_TILES, HAS_SPAN, CHUNKED,
    )  # fmt: skip
    # For a sequence without keys, the first program writes zeros. In a CUDA graph, unused items
    # have no rows, and their programs do nothing.
    if (split < tl.maximum(pieces, 1)) & (first_row < query_len * GROUP):
        local = tl.arange(0, ROWS)
        row = first_row + local
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        real_row = token < query_len
        context = seq_len - query_len
        position = context + token
        flat_token = (query_start + token).to(tl.int64)
        queries = query + flat_token * query_token_stride + head * query_head_stride
        q, q_rest, factors = _queries(
            queries, real_row, factor, MAIN, PADDED_MAIN, KEY_DIM - MAIN, PADDED_REST, DTYPE, UPCAST
        )
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes + head, mask=real_row, other=0.0)
        table = block_tables + seq.to(tl.int64) * table_stride
        key_cache += kv_head * (BLOCK_SIZE * (KEY_DIM + SCALE_BYTES))
        value_cache += kv_head * (BLOCK_SIZE * (VALUE_DIM + SCALE_BYTES))

        begin += split * piece * KEYS
        end = tl.minimum(begin + piece * KEYS, end)
        cuts = _cuts(
            begin, end, context, first_row, seq_len, span, GROUP, ROWS, KEYS, HAS_SPAN, CHUNKED
        )
        first_key = 0
        if HAS_SPAN:
            first_key = first_seen(context + first_row // GROUP, span, CHUNKED)
        # Starts finite, so that a row that sees no key of a tile gives no NaN.
        maximum = tl.full([ROWS], -1e30, tl.float32)
        # In small tiles each (row, key) has its own sum, added up at the end: adding them in each
        # tile would synchronize the warps.
        spread: tl.constexpr = ROWS * KEYS <= SMALL
        total = tl.zeros([ROWS, KEYS] if spread else [ROWS], tl.float32)
        attended = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
        # Without a span, all rows see the first keys.
        for part in tl.static_range(0 if HAS_SPAN else 1, 3):
            maximum, total, attended = _walk(
                maximum, total, attended, cuts[part], cuts[part + 1], first_key,
                q, q_rest, position, slope, factors, key_cache, value_cache, table,
                soft_cap, span, key_stride, value_stride,
                DTYPE, KEY_DIM, VALUE_DIM, MAIN, PADDED_MAIN, PADDED_REST, PADDED_VALUE,
                LATENT, SAME_PLACES, SCALE_BYTES, BLOCK_SIZE, KEYS, part != 1,
                HAS_SPAN, CHUNKED, HAS_CAP, HAS_ALIBI, LOG2_E, UPCAST,
            )  # fmt: skip

        if spread:
            total = tl.sum(total, 1)
        # Where keys are split, the merge adds the sinks.
        whole = token < tl.where(pieces > 1, 0, query_len)
        weight, lse = _weigh(maximum, total, sinks + head, whole, value_scale, HAS_SINKS, LOG2_E)
        attended *= weight[:, None]
        dim = tl.arange(0, PADDED_VALUE)
        real = real_row[:, None] & (dim < VALUE_DIM)[None, :]
        if pieces > 1:
            place = (item * tl.num_programs(1) + kv_head).to(tl.int64) * PARTIAL_ROWS + local
            tl.store(partial_lse + place, lse, mask=real_row)
            tl.store(partial_out + place[:, None] * VALUE_DIM + dim[None, :], attended, mask=real)
        else:
            to = (flat_token * NUM_HEADS + head) * VALUE_DIM
            rounded = attended.to(out.dtype.element_ty)
            tl.store(out + to[:, None] + dim[None, :], rounded, mask=real)
