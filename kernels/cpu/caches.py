"""The caches and batches of a step, checked and laid out for C++.

A model calls the kernels once per layer, so shared objects are checked once: each cache the first
time, the batch when it changes.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.kernels.metadata import AttentionMetadata, LayerCache, StateCache
from octavo.kernels.whole_numbers import MIN_BLOCK_SIZE, dim_of

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_DTYPES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_SMALLER = {*_FP8_DTYPES, torch.int8}
_NO_SCALES = 1.0, 1.0
_UNIT = 8  # block and head sizes are multiples of it
_MAX_KEY_DIM = 576  # as in cache.h


class Cache(Structure):
    """One layer's cache; the same as in cache.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("num_blocks", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("fp8", c_int32),
        ("key_scale", c_float),
        ("value_scale", c_float),
        ("in_codes", c_int32),
    )


class Batch(Structure):
    """A batch's sequences as one layer group sees them; the same as in plan.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("table_width", c_int32),
        ("num_seqs", c_int32),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
    )


class State(Structure):
    """A state's location in the cache; the same as StateCache in operators.h."""

    _fields_ = (
        *(("state", c_void_p), ("block_stride", c_int64), ("row_size", c_int64)),
        *(("num_blocks", c_int32), ("rows_per_block", c_int32)),
        *(("first_row", c_int32), ("group", c_int32), ("row_shape", c_int32 * 2)),
    )


class CheckedCache:
    """A layer's checked cache and its struct. It does not keep the cache alive.

    Attributes:
        dtype: Dtype of queries, of results, and of the cache unless that is smaller.
        scales: Factors of keys and of values in an fp8 cache; else 1.
    """

    __slots__ = (*("dtype", "keys", "scales", "struct", "values"),)

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> None:
        num_blocks, num_kv_heads, block_size, _ = key_cache.shape
        self.dtype = dtype if key_cache.dtype in _SMALLER else key_cache.dtype
        self.scales = scales
        key_scale, value_scale = scales
        if not (key_scale > 0 and value_scale > 0):
            raise ValueError(f"scales of keys and values must be positive: they are {scales}")
        key_dim, value_dim = dim_of(key_cache), 0
        _check_block(key_cache)
        if value_cache is None and key_cache.dtype == torch.int8:
            raise ValueError(f"a cache of {key_cache.dtype} has values, not latents")
        if value_cache is not None:
            value_dim = dim_of(value_cache)
            _check_block(value_cache)
            if value_cache.dtype != key_cache.dtype:
                raise ValueError(f"keys are {key_cache.dtype} and values {value_cache.dtype}")
            if value_cache.shape[:3] != key_cache.shape[:3]:
                raise ValueError(f"keys are {key_cache.shape} and values {value_cache.shape}")
        if key_dim > _MAX_KEY_DIM:
            raise ValueError(f"keys of {key_dim} elements: {_MAX_KEY_DIM} is the most")
        self.keys, self.values = weakref.ref(key_cache), _reference(value_cache)
        self.struct = Cache(
            key_cache.data_ptr(),
            None if value_cache is None else value_cache.data_ptr(),
            key_cache.stride(0),
            0 if value_cache is None else value_cache.stride(0),
            num_blocks,
            num_kv_heads,
            key_dim,
            value_dim,
            block_size,
            DTYPES[self.dtype],
            _FP8_DTYPES.get(key_cache.dtype, 0),
            key_scale,
            key_scale if value_cache is None else value_scale,
            key_cache.dtype == torch.int8,
        )

    def is_of(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> bool:
        """Return whether these very tensors were checked for the same use."""
        same = self.keys() is key_cache and self.values() is value_cache
        used = dtype if key_cache.dtype in _SMALLER else self.dtype
        return same and self.dtype == used and self.scales == scales


class CheckedCaches:
    """All layers' checked caches and arrays of their structs. Keeps the caches alive.

    Args:
        layers: Each layer's cache.
        states: Each state's cache.
        dtype: Dtype of the model.
        scales: Each layer's (key scale, value scale) if the cache is fp8; else None.

    Raises:
        ValueError: The kernels do not support them.
    """

    __slots__ = ("groups", "layers", "states", "tensors", "written")

    def __init__(
        self,
        layers: Sequence[LayerCache],
        states: Sequence[StateCache],
        dtype: torch.dtype,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.tensors = layers, states
        caches = [
            CheckedCache(layer.keys, layer.values, dtype, of_layer)
            for layer, of_layer in zip(layers, scales or [_NO_SCALES] * len(layers), strict=True)
        ]
        self.layers = (Cache * len(caches))(*(cache.struct for cache in caches))
        self.groups = (c_int32 * len(caches))(*(layer.group for layer in layers))
        self.written = (c_int32 * len(caches))(*(layer.written for layer in layers))
        self.states = (State * len(states))(*map(make_state, states))

    def are_of(self, layers: Sequence[LayerCache], states: Sequence[StateCache]) -> bool:
        """Return whether these are the very caches that were checked."""
        return self.tensors[0] is layers and self.tensors[1] is states


def make_batch(metadata: AttentionMetadata) -> Batch:
    """Return a batch's struct.

    Raises:
        ValueError: A tensor is not contiguous, or of another type.
    """
    tables = metadata.block_tables
    for name in ("query_starts", "seq_lens", "block_tables"):
        tensor = getattr(metadata, name)
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous int32")
    return Batch(
        *(metadata.query_starts.data_ptr(), metadata.seq_lens.data_ptr(), tables.data_ptr()),
        *(tables.stride(0), tables.shape[1], metadata.seq_lens.shape[0]),
        *check_slots(metadata.slot_mapping),
    )


def check_slots(slot_mapping: Tensor) -> tuple[int, int]:
    """Return the address and the number of a step's slots.

    Raises:
        ValueError: They are not contiguous, or of another type.
    """
    if slot_mapping.dtype != torch.int64 or not (
        slot_mapping.dim() == 1 and slot_mapping.is_contiguous()
    ):
        raise ValueError("slot_mapping must be contiguous int64")
    return slot_mapping.data_ptr(), len(slot_mapping)


def make_state(cache: StateCache) -> State:
    """Return a state's struct.

    Raises:
        ValueError: A block is not contiguous.
    """
    state, first_row, group = cache
    num_blocks, rows_per_block, *row_shape = state.shape
    if not state[:1].is_contiguous():
        raise ValueError(f"a block of states must be contiguous: strides are {state.stride()}")
    return State(
        *(state.data_ptr(), state.stride(0), math.prod(row_shape)),
        *(num_blocks, rows_per_block, first_row, group, (c_int32 * 2)(*row_shape)),
    )


def _reference(cache: Tensor | None) -> Callable[[], Tensor | None]:
    """Return a weak reference to a tensor; for None, a function that returns None."""
    return _nothing if cache is None else weakref.ref(cache)


def _nothing() -> None:
    return None


def _check_block(cache: Tensor) -> None:
    """Raise ValueError if C++ would misread a cache's memory."""
    _, _, block_size, width = cache.shape
    if cache.dtype not in {*DTYPES, *_SMALLER}:
        known = ", ".join(map(str, [*DTYPES, *_FP8_DTYPES, torch.int8]))
        raise ValueError(f"the cache is {cache.dtype}: it must be one of {known}")
    if cache.stride()[1:] != (block_size * width, width, 1):
        raise ValueError(f"a block must be contiguous: strides are {cache.stride()}")
    least, dim = MIN_BLOCK_SIZE if cache.dtype == torch.int8 else _UNIT, dim_of(cache)
    if block_size & (block_size - 1) or block_size < least or dim % _UNIT:
        raise ValueError(
            f"block size {block_size} must be a power of two from {least}, and head size "
            f"{dim} a multiple of {_UNIT}"
        )
