"""The door to the kernels: each operation, on whatever device its tensors are.

The cache is one tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size,
head_dim]`, so that a block (all layers, keys and values) is contiguous: to copy or
swap one is a single move. Layer l's keys are `cache[:, l, 0]` and its values
`cache[:, l, 1]`: strided over blocks, contiguous inside one. In which order a block
keeps its elements is each device's own matter: only `write_kv` and `paged_attention`
look inside.

Triton is imported only where CUDA tensors come; a machine without it runs on CPU.
"""

from functools import cache
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.metadata import AttentionMetadata, AttentionPlan
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Of keys and values only."""
LEAST_CAPABILITY = (8, 0)
"""The compute capability, Ampere's, from which on Triton serves GPUs."""
FP8_E4M3_CAPABILITY = (8, 9)
"""GPUs convert e4m3 from this compute capability on, and e5m2 all."""
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 256
MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256
HEAD_DIM_MULTIPLE = 8


class _Backend(Protocol):
    """What each device's package provides."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: float,
    ) -> None: ...

    def rotate_and_write(  # noqa: PLR0917
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: float,
    ) -> Tensor: ...

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        alibi_slopes: Tensor | None,
        **scales: float,
    ) -> Tensor: ...

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None: ...

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None: ...

    def argmax(self, rows: Tensor) -> Tensor: ...

    def draw_tokens(self, logits: Tensor, sampling: SamplingTensors) -> Tensor: ...

    def score_tokens(self, logits: Tensor, tokens: Tensor, most: int) -> Scores: ...


@cache
def _backend(device_type: str) -> _Backend:
    """Returns the kernels for a type of device, importing them on first use."""
    if device_type == "cuda":
        from octavo.kernels import triton  # noqa: PLC0415  # absent on machines without a GPU

        return cast("_Backend", triton)
    if device_type == "cpu":
        from octavo.kernels import cpu  # noqa: PLC0415  # looks for a compiler

        return cast("_Backend", cpu)
    raise ValueError(f"device {device_type!r} is not supported: use 'cuda' or 'cpu'")


def _scales(key_cache: Tensor, key_scale: float, value_scale: float) -> dict[str, float]:
    """Those of an fp8 cache; others have none."""
    if key_cache.dtype in FP8_DTYPES:
        return {"key_scale": key_scale, "value_scale": value_scale}
    return {}


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Writes each token's key and value to its slot of the cache.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, of the cache's dtype or, where
            that is fp8, of the model's; may be a strided view.
        value: as `key`.
        key_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous
            inside a block.
        value_cache: as `key_cache`.
        slot_mapping: `[num_tokens]` int64, contiguous; `block * block_size + offset`.
            Negative slots are skipped.
        key_scale: an fp8 cache keeps keys divided by this, positive; what is then too
            large for its type becomes the largest.
        value_scale: as `key_scale`.

    Raises:
        IndexError: a slot is past the cache's end (CPU only; a GPU does not look).
    """
    _backend(key_cache.device.type).write_kv(
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
    """Rotates queries and keys by their positions and writes keys and values to the cache.

    Rotary embedding of the kind that pairs element i of a head with element i +
    head_dim / 2 (RoFormer, Su et al. 2021, in GPT-NeoX's order).

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        key: `[num_tokens, num_kv_heads, head_dim]`.
        value: as `key`.
        cos: `[num_tokens, n]`, n from head_dim / 2: of each pair's angle; the rest is
            not read.
        sin: as `cos`, and laid out alike.
        key_cache: as for `write_kv`.
        value_cache: likewise.
        slot_mapping: likewise.
        key_scale: likewise.
        value_scale: likewise.

    Returns:
        Tensor: the rotated queries, contiguous.

    Raises:
        IndexError: a slot is past the cache's end (CPU only).
    """
    return _backend(key_cache.device.type).rotate_and_write(
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
    """Attends causally over keys and values that lie in blocks.

    Decodes and prefill chunks of any length share one call. The queries of a
    sequence are its last positions; query j of q sees the positions up to
    `seq_len - q + j`. A logit is `scale * q.k`, then capped, then biased, then
    masked. Slots past a sequence's end and free blocks may hold anything, NaN too.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, of the cache's dtype unless that is
            fp8; may be a strided view. Head h reads KV head `h // (num_heads // num_kv_heads)`.
        key_cache: `[num_blocks, num_kv_heads, block_size, head_dim]`, contiguous
            inside a block.
        value_cache: as `key_cache`.
        metadata: which rows are whose, and which blocks.
        scale: multiplies the dot products; positive.
        sliding_window: how many positions, its own included, a query sees; all
            the earlier ones if None.
        soft_cap: c turns a logit x into `c * tanh(x / c)`.
        alibi_slopes: `[num_heads]` float32; adds `slope * (key - query position)`.
        key_scale: what keys in an fp8 cache are to be multiplied by.
        value_scale: as `key_scale`.

    Returns:
        Tensor: `[num_tokens, num_heads, head_dim]`, contiguous, of the query's dtype.

    Raises:
        IndexError: a block table names a block that is not in the cache (CPU only).
    """
    return _backend(query.device.type).paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        **_scales(key_cache, key_scale, value_scale),
    )


def plan_attention(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan | None:
    """Shares a step's attention out among a GPU's programs, once for all layers.

    Args:
        query_lens: `[num_seqs]`; queries of each sequence.
        seq_lens: `[num_seqs]`; its tokens, queries included.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: elements of a head.
        dtype: of queries.
        cache_dtype: of keys and values.
        device: where the cache is.

    Returns:
        AttentionPlan | None: for `AttentionMetadata.plan`; none on a CPU, which
            needs none.
    """
    if device.type != "cuda":
        return None
    from octavo.kernels.triton import plan_attention as plan  # noqa: PLC0415  # as in `_backend`

    return plan(
        query_lens,
        seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        device=device,
    )


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks within a cache, all layers, keys and values (copy-on-write).

    Args:
        cache: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        pairs: `[n, 2]` int64 on the CPU, (source, destination) block numbers. No
            destination is also a source or appears twice.

    Raises:
        IndexError: a number is not in the cache.
    """
    _check_pairs(pairs, cache.shape[0], cache.shape[0])
    if len(pairs):
        _backend(cache.device.type).copy_blocks(cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks from one cache to another on the same device.

    On a CPU that is a swap. On a GPU it is half of one: between the cache and a
    buffer, from where or to which a single transfer goes over the bus.

    Args:
        source: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
        destination: the same but for the number of blocks.
        pairs: `[n, 2]` int64 on the CPU, (source block, destination block). No
            destination appears twice.

    Raises:
        IndexError: a number is not in its cache.
        ValueError: the caches are on different devices.
    """
    if source.device != destination.device:
        raise ValueError(f"blocks cannot go from {source.device} to {destination.device}")
    _check_pairs(pairs, source.shape[0], destination.shape[0])
    if len(pairs):
        _backend(source.device.type).swap_blocks(source, destination, pairs)


def argmax(rows: Tensor) -> Tensor:
    """Finds the first of each row's greatest elements.

    Args:
        rows: `[n, columns]`, of one of `DTYPES`.

    Returns:
        Tensor: `[n]` int64; any column where a row has what is not a number.
    """
    return _backend(rows.device.type).argmax(rows)


def draw_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Draws a token from each row.

    Of a row, divided by its temperature, softmax gives probabilities. Top-k keeps so many
    of the most likely tokens; of those, top-p the fewest of the most likely that have
    together its share or more; of those, min-p all at least its fraction as likely as the
    most likely. Of equal tokens at a cut, those with the lowest ids are kept (without a C++
    compiler, any of them). The token drawn is that at which the running sum of what is left,
    in the vocabulary's order, passes the row's uniform number times the whole. So a row's
    token does not depend on other rows.

    Args:
        logits: `[n, vocab_size]`. Minus infinity is impossible.
        sampling: how to draw from each row. Temperature 0 takes the most likely token, the
            lowest id on a tie.

    Returns:
        Tensor: `[n]` int64, from the vocabulary, even where logits are not numbers.
    """
    return _backend(logits.device.type).draw_tokens(logits, sampling)


def _check_pairs(pairs: Tensor, num_sources: int, num_destinations: int) -> None:
    """Raises IndexError if a block number is out of range: a copy would corrupt memory."""
    for column, count in ((0, num_sources), (1, num_destinations)):
        numbers = pairs[:, column]
        if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= count):
            name = ("source", "destination")[column]
            raise IndexError(f"a {name} block is out of range [0, {count}): {numbers.tolist()}")


def cpu_warning() -> str | None:
    """Return what slows the CPU's kernels down and what to do about it; None if nothing does."""
    from octavo.kernels import cpu  # noqa: PLC0415  # as in `_backend`

    return cpu.warning


def check_supported(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Says whether the kernels can serve a model, before memory is spent on it.

    On CPU it also loads them, which the first time on a machine means to compile
    them for some seconds: better while a model loads than in its first request.

    `cache_dtype` is that of keys and values, the model's own if None.

    Raises:
        ValueError: they cannot; the message names the limit that is broken.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        names = ", ".join(str(supported) for supported in DTYPES)
        raise ValueError(f"dtype {dtype} is not supported: use one of {names}")
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} KV heads"
        )
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"head size {head_dim} is not supported: it must be a multiple of "
            f"{HEAD_DIM_MULTIPLE} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        )
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(
            f"block size {block_size} is not supported: it must be a power of two "
            f"from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}"
        )
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device.type!r} is not supported: use 'cuda' or 'cpu'")
    if device.type == "cuda":
        _check_capability(device, LEAST_CAPABILITY, "the kernels need", "a CPU")
    if cache_dtype is not None and cache_dtype != dtype:
        _check_cache_dtype(cache_dtype, device)
    if device.type == "cpu":
        _backend("cpu")


def _check_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the cache cannot be of a dtype that is not the model's."""
    if dtype not in FP8_DTYPES:
        raise ValueError(f"a KV cache of {dtype} is not supported: use the model's dtype or fp8")
    if device.type == "cpu":
        raise ValueError("an fp8 KV cache is for GPUs only: CPUs have no arithmetic for it")
    if dtype == torch.float8_e4m3fn:
        _check_capability(device, FP8_E4M3_CAPABILITY, "fp8_e4m3 needs", "fp8_e5m2")


def _check_capability(
    device: torch.device, least: tuple[int, int], needs: str, instead: str
) -> None:
    """Raises ValueError if the GPU that `device` is, where there is one, can do too little."""
    if torch.cuda.is_available() and (has := torch.cuda.get_device_capability(device)) < least:
        raise ValueError(
            "{} a GPU of compute capability {}.{} or later, and this one has {}.{}: use {}".format(
                needs, *least, *has, instead
            )
        )


def score_tokens(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    """Finds log-probabilities, by a softmax over each row.

    Args:
        logits: `[n, vocab_size]`, of one of `DTYPES`.
        tokens: `[n]` int64 of the vocabulary, whose log-probabilities are wanted.
        most: how many of each row's most likely tokens are wanted too.

    Raises:
        ValueError: the vocabulary has fewer.
    """
    if not 0 <= most <= logits.shape[1]:
        raise ValueError(f"{most} tokens are wanted of a vocabulary of {logits.shape[1]}")
    return _backend(logits.device.type).score_tokens(logits, tokens, most)
