"""The kernels' operations; each runs on the device of its tensors.

The cache is one tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. A block
(all layers, keys and values) is contiguous, so one copy moves it. Layer l's keys are
`cache[:, l, 0]` and its values `cache[:, l, 1]`: strided over blocks, contiguous inside one. Each
backend may choose the order of elements in a block: only `write_kv`, `rotate_and_write` and
`paged_attention` look inside. They take any such views. Keys and values may differ in width.

Latent attention (DeepSeek-V2, 2024, section 2.1.2) has keys alone: with its products absorbed, the
first elements of a key are its value. Its value cache is None.
"""

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.activation import Activation
from octavo.kernels.backend import find_backend
from octavo.kernels.gpu import E4M3_DTYPES
from octavo.kernels.low_rank import LowRankBatch
from octavo.kernels.metadata import AttentionMetadata, AttentionPlan, AttentionShape
from octavo.kernels.quantized import QuantizedWeight
from octavo.kernels.whole_numbers import MIN_BLOCK_SIZE as WHOLE_MIN_BLOCK_SIZE

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (*E4M3_DTYPES, torch.float8_e5m2)
"""Dtypes for the KV cache only."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
MIN_HEAD_DIM, MAX_KEY_DIM, MAX_VALUE_DIM = 8, 576, 512
HEAD_DIM_MULTIPLE = 8
FIRST_KEY_MULTIPLE = 16
"""The first key that a sequence's queries see is rounded down to a multiple of this number. Entries
of block tables before it are not read."""


def _scales(key_cache: Tensor, key_scale: float, value_scale: float) -> dict[str, float]:
    """Return the scale arguments of an fp8 cache; none for other caches."""
    if key_cache.dtype in FP8_DTYPES:
        return {"key_scale": key_scale, "value_scale": value_scale}
    return {}


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
    """Write each token's key and value to its slot of the cache.

    Args:
        key: `[num_tokens, num_kv_heads, key_dim]`, of the cache's dtype, or of the model's for a
            cache of fp8 or of whole numbers; may be a strided view.
        value: `[num_tokens, num_kv_heads, value_dim]`, of the dtype of `key`; may be a strided
            view. None if values are parts of keys.
        key_cache: `[num_blocks, num_kv_heads, block_size, key_dim]`, contiguous inside a block. For
            whole numbers, `whole_numbers.width_of` gives the last size, here and of values.
        value_cache: `[num_blocks, num_kv_heads, block_size, value_dim]`, contiguous inside a block;
            None if `value` is.
        slot_mapping: `[num_tokens]` int64, contiguous; `block * block_size + offset`. Negative
            slots are skipped.
        key_scale: An fp8 cache stores keys divided by this positive number, clamped to its range.
            A CPU rounds subnormal numbers to zero or to the least normal number.
        value_scale: An fp8 cache stores values divided by this positive number, clamped.

    Raises:
        IndexError: A slot is past the cache's end (CPU only; a GPU does not check).
    """
    find_backend(key_cache.device.type).write_kv(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        **_scales(key_cache, key_scale, value_scale),
    )


def rotate_and_write(  # noqa: PLR0917
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
    """Rotate queries and keys by their positions and write keys and values to the cache.

    The rotary embedding pairs element i of a head with element i + key_dim / 2 (RoFormer, Su et al.
    2021, in GPT-NeoX's order).

    Args:
        query: `[num_tokens, num_heads, key_dim]`.
        key: `[num_tokens, num_kv_heads, key_dim]`.
        value: `[num_tokens, num_kv_heads, value_dim]`.
        cos: `[num_tokens, n]` with n >= key_dim / 2: the cosine of each pair's angle; the rest is
            not read.
        sin: `[num_tokens, n]`: the sine of each pair's angle, with the strides of `cos`.
        key_cache: See `write_kv`.
        value_cache: See `write_kv`.
        slot_mapping: See `write_kv`.
        key_scale: See `write_kv`.
        value_scale: See `write_kv`.

    Returns:
        The rotated queries, contiguous.

    Raises:
        IndexError: A slot is past the cache's end (CPU only).
    """
    return find_backend(key_cache.device.type).rotate_and_write(
        query,
        key,
        value,
        cos,
        sin,
        key_cache,
        value_cache,
        slot_mapping,
        **_scales(key_cache, key_scale, value_scale),
    )


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
    """Compute causal attention over keys and values in cache blocks.

    One call computes decodes and prefill chunks of any length. The queries of a sequence are its
    last positions; query j of q sees the positions up to `seq_len - q + j`. A logit is
    `scale * q.k`, then capped, then biased, then masked. Slots past a sequence's end and free
    blocks may hold anything, including NaN. Let p be the first position that a sequence's queries
    see, rounded down to a multiple of `FIRST_KEY_MULTIPLE`. Its block table's entries for blocks
    that end before p may be any number: those blocks may be free.

    Args:
        query: `[num_tokens, num_heads, key_dim]`, of the tokens' dtype as in `write_kv`; may be a
            strided view. Head h reads KV head `h // (num_heads // num_kv_heads)`.
        key_cache: `[num_blocks, num_kv_heads, block_size, key_dim]`, contiguous inside a block.
        value_cache: `[num_blocks, num_kv_heads, block_size, value_dim]`, contiguous inside a block;
            None: the first `value_dim` elements of a key are its value.
        metadata: Each sequence's rows and blocks.
        scale: Positive factor of the dot products.
        sliding_window: Number of positions that a query sees, including its own; None: all earlier
            ones.
        chunk: Positions per chunk of a sequence; a query at position p sees keys from
            `p - p % chunk` (Llama 4). None: no chunks. Excludes `sliding_window`.
        soft_cap: A cap c maps a logit x to `c * tanh(x / c)`.
        alibi_slopes: `[num_heads]` float32; adds `slope * (key - query position)`.
        sinks: `[num_heads]` float32; an extra logit without a value in each softmax of its head
            (gpt-oss, after Xiao et al. 2023), neither scaled nor capped.
        value_dim: Elements of a value; needed without a value cache.
        key_scale: Factor of the keys in an fp8 cache.
        value_scale: Factor of the values in an fp8 cache; not used without a value cache.

    Returns:
        `[num_tokens, num_heads, value_dim]`, contiguous, of the query's dtype.

    Raises:
        IndexError: A block table names a block that is not in the cache (CPU only).
        ValueError: There are both a window and chunks, or `value_dim` does not fit the caches.
    """
    if sliding_window is not None and chunk is not None:
        raise ValueError(f"attention has either a window ({sliding_window}) or chunks ({chunk})")
    return find_backend(query.device.type).paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        chunk=chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        value_dim=value_dim,
        **_scales(key_cache, key_scale, value_scale),
    )


def plan_attention(
    query_lens: np.ndarray, seq_lens: np.ndarray, shape: AttentionShape | None
) -> AttentionPlan | None:
    """Divide a step's attention among a GPU's programs, once for all layers with the same heads.

    Args:
        query_lens: `[num_seqs]`; queries of each sequence.
        seq_lens: `[num_seqs]`; tokens of each sequence, including its queries.
        shape: The attention of these layers; None for states.

    Returns:
        The value of `AttentionMetadata.plan`; None for states and on a CPU, which need no plan.
    """
    if shape is None:
        return None
    return find_backend(shape.device.type).plan_attention(query_lens, seq_lens, shape)


def plan_room(
    sequences: int, chunks: int, rows: int, shape: AttentionShape | None
) -> AttentionPlan | None:
    """Return a plan with room for the items of any batch, for CUDA graphs.

    `AttentionPlan.take` puts a batch's items into the memory that the graphs read. The remaining
    items belong to one extra dummy sequence without tokens: they fill its rows, the rest, with
    zeros.

    Args:
        sequences: Maximum sequences of a batch, without the dummy.
        chunks: Maximum number of those sequences with several queries.
        rows: Rows of a batch, including the dummy's.
        shape: The attention of these layers; None for states.

    Returns:
        The plan; None for states and on a CPU.
    """
    if shape is None:
        return None
    return find_backend(shape.device.type).plan_room(sequences, chunks, rows, shape)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache: all layers, keys and values (copy-on-write).

    Args:
        cache: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        pairs: `[n, 2]` int64 on the CPU, (source, destination) block numbers. No destination is
            also a source or appears twice.

    Raises:
        IndexError: A block number is out of range.
    """
    _check_pairs(pairs, cache.shape[0], cache.shape[0])
    if len(pairs):
        find_backend(cache.device.type).copy_blocks(cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one cache to another on the same device.

    On a CPU this is a whole swap. On a GPU it copies between the cache and a staging buffer, which
    crosses the bus in one transfer.

    Args:
        source: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        destination: The same, with any number of blocks.
        pairs: `[n, 2]` int64 on the CPU, (source block, destination block). No destination appears
            twice.

    Raises:
        IndexError: A block number is out of range.
        ValueError: The caches are on different devices.
    """
    if source.device != destination.device:
        raise ValueError(f"cannot copy blocks from {source.device} to {destination.device}")
    _check_pairs(pairs, source.shape[0], destination.shape[0])
    if len(pairs):
        find_backend(source.device.type).swap_blocks(source, destination, pairs)


def add_low_rank(out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
    """Add the low-rank product of each row's adapter to a linear layer's outputs.

    The product is `scale * (x @ down.T) @ up`, with sums in float32.

    Args:
        out: `[num_rows, outputs]`, of the dtype of `x` or float32; changed in place. Each row must
            be contiguous; rows may be strided.
        x: `[num_rows, inputs]`, of one of `DTYPES`, as the matrices. Each row must be contiguous;
            rows may be strided.
        batch: The rows that have an adapter, and the adapters' matrices.
        layer: Index of the layer in `batch.records`.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    if not len(x) == len(out) == batch.num_rows:
        raise ValueError(
            f"adapters are for {batch.num_rows} rows, but the layer has {len(x)} inputs and"
            f" {len(out)} outputs"
        )
    if x.stride(1) != 1 or out.stride(1) != 1 or out.dtype not in {x.dtype, torch.float32}:
        raise ValueError(
            f"rows must be contiguous, and outputs {x.dtype} or float32: strides are {x.stride()}"
            f" and {out.stride()}, outputs are {out.dtype}"
        )
    if len(batch.tiles):
        find_backend(x.device.type).add_low_rank(out, x, batch, layer)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply by quantized weights of a linear layer.

    Each weight is rounded to the dtype of `x`; sums are in float32. On a CPU this is plain PyTorch,
    for tests; engines on a CPU use `kernels/cpu/linear.cpp`.

    Args:
        x: `[rows, inputs]`, of one of `DTYPES`.
        weight: The weights.
        bias: `[outputs]`.
        dtype: Dtype of the result: that of `x` (default) or float32.

    Returns:
        `[rows, outputs]`.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    if x.dim() != 2 or x.shape[1] != weight.inputs:
        raise ValueError(f"rows of {weight.inputs} inputs are needed, not {list(x.shape)}")
    kind = dtype or x.dtype
    if kind not in {x.dtype, torch.float32}:
        raise ValueError(f"outputs must be {x.dtype} or float32, not {kind}")
    return find_backend(x.device.type).quantized_linear(x, weight, bias, kind)


def quantized_experts(  # noqa: PLR0917
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: QuantizedWeight,
    up_bias: Tensor | None,
    down: QuantizedWeight,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """Compute a mixture of experts with quantized weights.

    Weights and the activations between the products are rounded to the dtype of `x`; sums are in
    float32. On a CPU this is plain PyTorch, for tests: see `kernels/cpu/experts.cpp`.

    Args:
        x: `[rows, hidden]`, of one of `DTYPES`.
        expert_ids: `[rows, chosen]` int64; those that do not exist are skipped.
        weights: `[rows, chosen]`.
        up: `[experts * projected, hidden]`, each expert's gates and then its up projections.
        up_bias: `[experts, projected]`, or None.
        down: `[experts * hidden, inner]`.
        down_bias: `[experts, hidden]`, or None.
        activation: Maps `[projected]` to `[inner]`.

    Returns:
        `[rows, hidden]`, of the dtype of `x`: the sum of the row's weighted experts.

    Raises:
        ValueError: The tensors do not fit each other.
    """
    hidden, projected = up.inputs, down.inputs * (2 if activation.gated else 1)
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"rows of {hidden} inputs are needed, not {list(x.shape)}")
    if down.outputs % hidden or up.outputs != down.outputs // hidden * projected:
        raise ValueError(
            f"experts of {hidden} and {down.inputs} inputs cannot have {up.outputs} and"
            f" {down.outputs} outputs in all"
        )
    return find_backend(x.device.type).quantized_experts(
        x, expert_ids, weights, up, up_bias, down, down_bias, activation
    )


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by fp8 weights of a linear layer; each row is rounded to fp8.

    A row's scale maps its greatest magnitude to the greatest e4m3 value. Sums are in float32.

    Args:
        x: `[rows, inputs]`, of one of `DTYPES`.
        weight: `[outputs, inputs]` e4m3.
        scale: `[1, outputs]` float32; a weight is its e4m3 value times its output's scale.
        bias: `[outputs]`.

    Returns:
        `[rows, outputs]`, of the dtype of `x`.
    """
    return find_backend(x.device.type).fp8_linear(x, weight, scale, bias)


def has_fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies in fp8 as `fp8_linear` does.

    Args:
        device: The device.
        dtype: Dtype of the rows.
    """
    return find_backend(device.type).has_fp8_products(device, dtype)


def _check_pairs(pairs: Tensor, num_sources: int, num_destinations: int) -> None:
    """Raise IndexError if a block number is out of range, since a copy would corrupt memory."""
    for column, count in ((0, num_sources), (1, num_destinations)):
        numbers = pairs[:, column]
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= count):
            name = ("source", "destination")[column]
            raise IndexError(f"a {name} block is out of range [0, {count}): {numbers.tolist()}")


def kernel_path(device: torch.device) -> str:
    """Return the name of the kernels of a device; see `octavo.kernels.backend.Backend.path`."""
    return find_backend(device.type).path


def device_warning(device: torch.device) -> str | None:
    """Return why the kernels are slow on this machine, and a remedy; None if they are not."""
    return find_backend(device.type).warning


def check_supported(
    *,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Check that the kernels support a model, before memory is allocated for it.

    This also loads the kernels. The first time on a CPU, this compiles them for some seconds:
    better while the model loads than during its first request.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        block_size: Tokens per block.
        dtype: Dtype of the model.
        device: The device that the model runs on.
        cache_dtype: Dtype of the KV cache; default `dtype`.

    Raises:
        ValueError: The kernels do not support the model; the message names the limit.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        names = ", ".join(str(supported) for supported in DTYPES)
        raise ValueError(f"dtype {dtype} is not supported: use one of {names}")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} KV heads"
        )
    for name, dim, most in (
        ("key", key_dim, MAX_KEY_DIM),
        ("value", value_dim, MAX_VALUE_DIM),
    ):
        if not MIN_HEAD_DIM <= dim <= most or dim % HEAD_DIM_MULTIPLE:
            raise ValueError(
                f"{name} size {dim} of a head is not supported: it must be a multiple of "
                f"{HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {most}"
            )
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(
            f"block size {block_size} is not supported: it must be a power of two "
            f"from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
        )
    smaller = cache_dtype if cache_dtype != dtype else None
    if smaller is not None and smaller not in (*FP8_DTYPES, torch.int8):
        raise ValueError(
            f"a KV cache of {smaller} is not supported: use the model's dtype, fp8 or int8"
        )
    if smaller == torch.int8 and block_size < WHOLE_MIN_BLOCK_SIZE:
        raise ValueError(
            f"block size {block_size} is not supported for a KV cache of int8: it must be at least"
            f" {WHOLE_MIN_BLOCK_SIZE}"
        )
    find_backend(device.type).check_device(device, smaller)
