"""The compiled kernels on a CPU: passes the pointers and strides of tensors to C++.

A model calls these once per layer, so shared objects are checked once: each cache the first time,
the batch when it changes.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    POINTER,
    Array,
    Structure,
    addressof,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.blocks import BlockKernels
from octavo.kernels.cpu.experts import ExpertKernels
from octavo.kernels.cpu.latent import LatentKernels, LatentProducts, PackedLatents
from octavo.kernels.cpu.library import load_library
from octavo.kernels.cpu.linear import LinearKernels
from octavo.kernels.cpu.low_rank import LowRankKernels
from octavo.kernels.cpu.program import Programs
from octavo.kernels.cpu.rounding import RoundingKernels
from octavo.kernels.cpu.states import StateKernels
from octavo.kernels.cpu.sums import RankSums
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.metadata import AttentionMetadata, LayerCache, StateCache
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores
from octavo.kernels.widths import width_of_values

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FP8_DTYPES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_NO_SCALES = 1.0, 1.0
_UNIT = 8  # block and head sizes are multiples of it
_MAX_KEY_DIM = 576  # as in cache.h


class _Cache(Structure):
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
    )


class _Batch(Structure):
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


class _State(Structure):
    """A state's location in the cache; the same as StateCache in operators.h."""

    _fields_ = (
        *(("state", c_void_p), ("block_stride", c_int64), ("row_size", c_int64)),
        *(("num_blocks", c_int32), ("rows_per_block", c_int32)),
        *(("first_row", c_int32), ("group", c_int32), ("row_shape", c_int32 * 2)),
    )


class _Step(Structure):
    """A step's caches and batches; the same as in operators.h."""

    _fields_ = (
        *(("layers", POINTER(_Cache)), ("groups", POINTER(c_int32)), ("written", POINTER(c_int32))),
        *(("states", POINTER(_State)), ("batches", POINTER(_Batch))),
        *(("adapters", c_void_p), ("threads", c_int32)),
    )


class Spent(Structure):
    """Seconds that steps spent in operators; the same as in operators.h."""

    _fields_ = tuple((name, c_double) for name in ("attention", "linear", "states"))


class _CheckedCache:
    """A layer's checked cache and its struct. It does not keep the cache alive.

    Attributes:
        dtype: Dtype of queries, of results, and of the cache unless that is fp8.
        scales: Factors of keys and of values in an fp8 cache; else 1.
        value_dim: Elements of a value; 0 if values are parts of keys.
    """

    __slots__ = (
        *("dtype", "key_dim", "keys", "num_kv_heads", "num_slots"),
        *("reference", "scales", "struct", "value_dim", "values"),
    )

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> None:
        num_blocks, self.num_kv_heads, block_size, self.key_dim = key_cache.shape
        fp8 = _FP8_DTYPES.get(key_cache.dtype, 0)
        self.dtype = dtype if fp8 else key_cache.dtype
        self.scales = scales
        key_scale, value_scale = scales
        if not (key_scale > 0 and value_scale > 0):
            raise ValueError(f"scales of keys and values must be positive: they are {scales}")
        self.num_slots = num_blocks * block_size
        self.value_dim = 0
        _check_block(key_cache)
        if value_cache is not None:
            self.value_dim = value_cache.shape[3]
            _check_block(value_cache)
            if value_cache.dtype != key_cache.dtype:
                raise ValueError(f"keys are {key_cache.dtype} and values {value_cache.dtype}")
            if value_cache.shape[:3] != key_cache.shape[:3]:
                raise ValueError(f"keys are {key_cache.shape} and values {value_cache.shape}")
        if self.key_dim > _MAX_KEY_DIM:
            raise ValueError(f"keys of {self.key_dim} elements: {_MAX_KEY_DIM} is the most")
        self.keys, self.values = weakref.ref(key_cache), _reference(value_cache)
        self.struct = _Cache(
            key_cache.data_ptr(),
            None if value_cache is None else value_cache.data_ptr(),
            key_cache.stride(0),
            0 if value_cache is None else value_cache.stride(0),
            num_blocks,
            self.num_kv_heads,
            self.key_dim,
            self.value_dim,
            block_size,
            _DTYPES[self.dtype],
            fp8,
            key_scale,
            key_scale if value_cache is None else value_scale,
        )
        self.reference = byref(self.struct)

    def is_of(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> bool:
        """Return whether these very tensors were checked for the same use."""
        same = self.keys() is key_cache and self.values() is value_cache
        used = dtype if key_cache.dtype in _FP8_DTYPES else self.dtype
        return same and self.dtype == used and self.scales == scales


class _CheckedBatch:
    """A checked batch and its struct."""

    __slots__ = ("metadata", "reference", "struct")

    def __init__(self, metadata: AttentionMetadata) -> None:
        tables = metadata.block_tables
        for name in ("query_starts", "seq_lens", "block_tables"):
            tensor = getattr(metadata, name)
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous int32")
        slots = _CheckedSlots(metadata.slot_mapping)
        self.metadata = metadata
        self.struct = _Batch(
            metadata.query_starts.data_ptr(),
            metadata.seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[1],
            metadata.seq_lens.shape[0],
            slots.pointer,
            slots.count,
        )
        self.reference = byref(self.struct)


class _CheckedSlots:
    """A checked slot mapping."""

    __slots__ = ("count", "pointer", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError("slot_mapping must be contiguous int64")
        self.tensor, self.count, self.pointer = tensor, tensor.shape[0], tensor.data_ptr()


class _CheckedBatches:
    """The checked batches of all groups of layers and an array of their structs."""

    __slots__ = ("groups", "structs")

    def __init__(self, groups: Sequence[AttentionMetadata]) -> None:
        self.groups = groups
        self.structs = (_Batch * len(groups))(*(_CheckedBatch(one).struct for one in groups))


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
            _CheckedCache(layer.keys, layer.values, dtype, of_layer)
            for layer, of_layer in zip(layers, scales or [_NO_SCALES] * len(layers), strict=True)
        ]
        self.layers = (_Cache * len(caches))(*(cache.struct for cache in caches))
        self.groups = (c_int32 * len(caches))(*(layer.group for layer in layers))
        self.written = (c_int32 * len(caches))(*(layer.written for layer in layers))
        self.states = (_State * len(states))(*map(_state, states))

    def are_of(self, layers: Sequence[LayerCache], states: Sequence[StateCache]) -> bool:
        """Return whether these are the very caches that were checked."""
        return self.tensors[0] is layers and self.tensors[1] is states


def _state(cache: StateCache) -> _State:
    """Return a state's struct.

    Raises:
        ValueError: A block is not contiguous.
    """
    state, first_row, group = cache
    num_blocks, rows_per_block, *row_shape = state.shape
    if not state[:1].is_contiguous():
        raise ValueError(f"a block of states must be contiguous: strides are {state.stride()}")
    return _State(
        *(state.data_ptr(), state.stride(0), math.prod(row_shape)),
        *(num_blocks, rows_per_block, first_row, group, (c_int32 * 2)(*row_shape)),
    )


class NativeKernels:
    """The kernels of `octavo.kernels.ops`, in C++. Several threads may call them.

    Raises:
        OSError: They cannot be compiled on this machine.

    Attributes:
        linear: The kernels for linear layers.
        latents: Packer of latent attention's weights.
        states: The kernels for layers that keep a state.
        experts: The kernel for mixtures of experts.
        programs: Builder of programs of operators.
        isa: Name in isa.cpp of the instruction set that the kernels use.
    """

    def __init__(self) -> None:
        library = load_library()
        library.octavo_isa.restype = c_char_p
        self.isa = library.octavo_isa().decode()
        rows = (c_void_p, c_int64, c_int64)
        self._attend = library.octavo_paged_attention
        self._attend.argtypes = (
            *(POINTER(_Cache), POINTER(_Batch), *rows, c_int, c_void_p, c_int),
            *(c_float, c_int, c_int, c_float, c_void_p, c_void_p, c_int),
        )
        self._attend.restype = c_int
        self._attend_latents = library.octavo_latent_attention
        self._attend_latents.argtypes = (
            *(POINTER(_Cache), POINTER(_Batch), *rows, c_int, c_int, POINTER(LatentProducts)),
            *(c_void_p, c_float, c_int, c_int, c_float, c_int),
        )
        self._attend_latents.restype = c_int
        self._write = library.octavo_write_kv
        self._write.argtypes = (POINTER(_Cache), *rows, *rows, c_void_p, c_int64, c_int)
        self._write.restype = c_int64
        self._rotate = library.octavo_rotate_and_write
        self._rotate.argtypes = (
            *(POINTER(_Cache), *rows, c_int, *rows, *rows, c_void_p, c_void_p, c_int64),
            *(c_void_p, c_int64, c_void_p, c_int),
        )
        self._rotate.restype = c_int64
        self._copy = library.octavo_copy_blocks
        self._copy.argtypes, self._copy.restype = (
            (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int),
            None,
        )
        self._set_step = library.octavo_set_step
        self._set_step.argtypes, self._set_step.restype = (POINTER(_Step),), None
        self._take_spent = library.octavo_take_spent
        self._take_spent.argtypes, self._take_spent.restype = (), Spent
        self._argmax = library.octavo_argmax
        self._argmax.argtypes, self._argmax.restype = (*rows, c_int64, c_int, c_void_p, c_int), None
        self._mask = library.octavo_mask_logits
        self._mask.argtypes, self._mask.restype = (
            (*rows, c_int64, c_int, c_void_p, c_int64, c_int),
            None,
        )
        self._draw = library.octavo_draw_tokens
        self._draw.argtypes, self._draw.restype = (*rows, c_int64, *[c_void_p] * 6, c_int), None
        self._score = library.octavo_score_tokens
        self._score.argtypes = (*rows, c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int)
        self._score.restype = None
        self._pin = library.octavo_pin_threads
        self._pin.argtypes, self._pin.restype = (c_void_p, c_void_p, c_int), c_int
        self.low_rank = LowRankKernels(library)
        self.linear = linear = LinearKernels(library, self.low_rank)
        self.blocks, self.experts = BlockKernels(library, linear), ExpertKernels(library, linear)
        self.states, self.sums = StateKernels(library), RankSums(library)
        self.latents, self.rounding = LatentKernels(linear), RoundingKernels(library)
        self.programs = Programs(library)
        self._caches: dict[int, _CheckedCache] = {}
        self._batch: _CheckedBatch | None = None  # of the latest call
        self._batches: _CheckedBatches | None = None  # of the latest call
        self._slots: _CheckedSlots | None = None  # of the latest call

    def write_kv(
        self,
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
        scales = key_scale, value_scale
        cache = self._check_cache(key_cache, value_cache, key.dtype, scales)
        slots = self._check_slots(slot_mapping)
        key = _fit(key, cache, cache.key_dim, slots)
        if value is not None:
            value = _fit(value, cache, cache.value_dim, slots)
        elif cache.value_dim:
            raise ValueError("the cache has values and none are given")
        bad = self._write(
            *(cache.reference, *_place(key), *((None, 0, 0) if value is None else _place(value))),
            *(slots.pointer, slots.count, torch.get_num_threads()),
        )
        _check_slot(bad, slot_mapping, cache)

    def rotate_and_write(  # noqa: PLR0917 - as in `octavo.kernels.ops`
        self,
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
        scales = key_scale, value_scale
        cache = self._check_cache(key_cache, value_cache, key.dtype, scales)
        slots = self._check_slots(slot_mapping)
        key = _fit(key, cache, cache.key_dim, slots)
        value = _fit(value, cache, cache.value_dim, slots)
        if len(query) != slots.count or query.shape[2] != cache.key_dim:
            raise ValueError(
                f"query {list(query.shape)} does not fit {slots.count} slots of heads of "
                f"{cache.key_dim}"
            )
        _check_dtype(query, cache)
        query = _rows(query)
        cos, sin = (angle.to(torch.float32).contiguous() for angle in (cos, sin))
        out = torch.empty(query.shape, dtype=cache.dtype)
        bad = self._rotate(
            *(cache.reference, *_place(query), query.shape[1], *_place(key), *_place(value)),
            *(cos.data_ptr(), sin.data_ptr(), cos.stride(0)),
            *(slots.pointer, slots.count, out.data_ptr(), torch.get_num_threads()),
        )
        _check_slot(bad, slot_mapping, cache)
        return out

    def paged_attention(
        self,
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
        scales = key_scale, value_scale
        cache = self._check_cache(key_cache, value_cache, query.dtype, scales)
        batch = self._check_batch(metadata)
        num_tokens, num_heads, key_dim = query.shape
        if key_dim != cache.key_dim or num_heads % cache.num_kv_heads:
            raise ValueError(
                f"{num_heads} query heads of {key_dim} do not fit a cache of "
                f"{cache.num_kv_heads} heads of {cache.key_dim}"
            )
        _check_dtype(query, cache)
        query = _rows(query)
        token_stride, head_stride, _ = query.stride()
        value_dim = width_of_values(key_cache, value_cache, value_dim)
        out = torch.empty((num_tokens, num_heads, value_dim), dtype=cache.dtype)
        slopes, logits = _of_heads(alibi_slopes), _of_heads(sinks)
        bad = self._attend(
            cache.reference,
            batch.reference,
            query.data_ptr(),
            token_stride,
            head_stride,
            num_heads,
            out.data_ptr(),
            value_dim,
            scale,
            sliding_window or 0,
            chunk or 0,
            soft_cap or 0.0,
            None if slopes is None else slopes.data_ptr(),
            None if logits is None else logits.data_ptr(),
            torch.get_num_threads(),
        )
        _check_table(bad, metadata, key_cache)
        return out

    def latent_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        metadata: AttentionMetadata,
        products: PackedLatents,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        chunk: int | None = None,
        key_scale: float = 1.0,
    ) -> Tensor:
        """Attend to a cache of latents, from which each head computes keys and values.

        Args:
            query: `[num_tokens, num_heads, key_dim + rotated]`; the last elements belong to the
                part of a key that the cache keeps beside the latent.
            key_cache: `[num_blocks, 1, block_size, latent_dim + rotated]`, float32, bfloat16 or
                fp8.
            metadata: See `octavo.kernels.ops.paged_attention`.
            products: Weights that turn latents into keys and values.
            scale: See `octavo.kernels.ops.paged_attention`.
            sliding_window: See `octavo.kernels.ops.paged_attention`.
            soft_cap: See `octavo.kernels.ops.paged_attention`.
            chunk: See `octavo.kernels.ops.paged_attention`.
            key_scale: See `octavo.kernels.ops.paged_attention`.

        Returns:
            `[num_tokens, num_heads, value_dim]`, contiguous.

        Raises:
            IndexError: A block table names a block that is not in the cache.
        """
        cache = self._check_cache(key_cache, None, query.dtype, (key_scale, key_scale))
        batch = self._check_batch(metadata)
        num_tokens, num_heads, query_dim = query.shape
        _check_dtype(query, cache)
        assert cache.dtype == products.values.dtype
        key_dim = query_dim - products.rotated
        query = _rows(query)
        out = torch.empty((num_tokens, num_heads, products.value_dim), dtype=cache.dtype)
        struct = LatentProducts(
            *(part.data_ptr() for part in (products.absorbing, products.keys, products.values)),
            *(key_dim, products.value_dim),
        )
        bad = self._attend_latents(
            *(cache.reference, batch.reference, *_place(query), num_heads, query_dim),
            *(byref(struct), out.data_ptr(), scale, sliding_window or 0, chunk or 0),
            *(soft_cap or 0.0, torch.get_num_threads()),
        )
        _check_table(bad, metadata, key_cache)
        return out

    def set_step(
        self,
        caches: CheckedCaches,
        groups: Sequence[AttentionMetadata],
        adapters: StepAdapters | None = None,
    ) -> object:
        """Set this thread's step for the operators that programs call.

        The arguments and the returned object must outlive those calls.
        """
        step, kept = self._step(caches, groups, adapters)
        self._set_step(byref(step))
        return kept

    def _step(
        self,
        caches: CheckedCaches,
        groups: Sequence[AttentionMetadata],
        adapters: StepAdapters | None,
    ) -> tuple[_Step, object]:
        """Return a step's struct, and the memory that it points to besides the arguments."""
        batches = self._check_batches(groups)
        struct = None if adapters is None else self.low_rank.structs.make(adapters)
        step = _Step(
            *(caches.layers, caches.groups, caches.written, caches.states, batches.structs),
            *(None if struct is None else addressof(struct), torch.get_num_threads()),
        )
        return step, struct

    def take_spent(self) -> Spent:
        """Return the seconds that this thread's steps spent in operators since the last call."""
        spent: Spent = self._take_spent()
        return spent

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the column of each row's greatest element; see `octavo.kernels.ops.argmax`.

        48 rows of 49,152 take 0.5 ms on 2 cores; torch takes 1.9 ms.
        """
        rows = _rows(rows)
        count, columns = rows.shape
        places = torch.empty(count, dtype=torch.int64)
        self._argmax(
            *(rows.data_ptr(), count, rows.stride(0), columns, _DTYPES[rows.dtype]),
            *(places.data_ptr(), torch.get_num_threads()),
        )
        return places

    def mask_logits(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        """Make tokens impossible, in place; see `octavo.kernels.ops.mask_logits`."""
        if logits.stride(1) != 1:
            raise ValueError(f"rows of logits must be contiguous: strides are {logits.stride()}")
        places = _places_of(dict(zip(rows.tolist(), masks, strict=True)), len(logits))
        self._mask(
            *(logits.data_ptr(), len(logits), logits.stride(0), logits.shape[1]),
            *(_DTYPES[logits.dtype], places, masks.shape[1], torch.get_num_threads()),
        )

    def draw_tokens(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """Sample a token from each row; see `octavo.kernels.ops.draw_tokens`."""
        logits = _rows(logits.float())
        count, columns = logits.shape
        tokens = torch.empty(count, dtype=torch.int64)
        kinds = np.float64, np.int64, np.float64, np.float64, np.float64
        numbers = list(map(np.ascontiguousarray, sampling, kinds))
        self._draw(
            *(logits.data_ptr(), count, logits.stride(0), columns),
            *(column.ctypes.data for column in numbers),
            *(tokens.data_ptr(), torch.get_num_threads()),
        )
        return tokens

    def score_tokens(self, logits: Tensor, tokens: Tensor, most: int) -> Scores:
        """Return log-probabilities; see `octavo.kernels.ops.score_tokens`."""
        logits = _rows(logits.float())
        count, columns = logits.shape
        scores = Scores(
            torch.empty(count),
            torch.empty((count, most), dtype=torch.int64),
            torch.empty((count, most)),
        )
        self._score(
            *(logits.data_ptr(), count, logits.stride(0), columns),
            *(tokens.contiguous().data_ptr(), most),
            *(tensor.data_ptr() for tensor in scores),
            torch.get_num_threads(),
        )
        return scores

    def pin_threads(self, places: Sequence[Sequence[int]]) -> bool:
        """Pin each thread of this thread's pool to its own core.

        Otherwise two of them share a core for milliseconds whenever another process needs one, and
        all wait for the slower: 48 streams on 2 cores get 457 tokens/s instead of 516.

        Args:
            places: The CPUs of each thread, the calling thread first; if empty, nothing happens.

        Returns: Whether all threads are pinned.
        """
        cpus = [cpu for place in places for cpu in place]
        ends = list(itertools.accumulate(map(len, places)))
        arrays = (c_int * len(cpus))(*cpus), (c_int * len(ends))(*ends)
        return bool(places) and bool(self._pin(*arrays, len(places)) == len(places))

    def _check_batch(self, metadata: AttentionMetadata) -> _CheckedBatch:
        batch = self._batch
        if batch is None or batch.metadata is not metadata:
            batch = self._batch = _CheckedBatch(metadata)
        return batch

    def _check_batches(self, groups: Sequence[AttentionMetadata]) -> _CheckedBatches:
        batches = self._batches
        if batches is None or batches.groups is not groups:
            batches = self._batches = _CheckedBatches(groups)
        return batches

    def _check_slots(self, slot_mapping: Tensor) -> _CheckedSlots:
        slots = self._slots
        if slots is None or slots.tensor is not slot_mapping:
            slots = self._slots = _CheckedSlots(slot_mapping)
        return slots

    def _check_cache(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> _CheckedCache:
        """Return a layer's checked cache; check it the first time."""
        cache = self._caches.get(id(key_cache))
        if cache is None or not cache.is_of(key_cache, value_cache, dtype, scales):
            cache = _CheckedCache(key_cache, value_cache, dtype, scales)
            self._caches[id(key_cache)] = cache
            weakref.finalize(key_cache, self._caches.pop, id(key_cache), None)
        return cache

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
        self.swap_blocks(cache, cache, pairs)

    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks between caches in CPU memory; see `ops.swap_blocks`."""
        if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
            raise ValueError(
                f"blocks of {list(source.shape[1:])} {source.dtype} cannot be copied to blocks "
                f"of {list(destination.shape[1:])} {destination.dtype}"
            )
        if not (source.is_contiguous() and destination.is_contiguous()):
            raise ValueError("caches must be contiguous")
        pairs = pairs.to(torch.int64).contiguous()
        self._copy(
            source.data_ptr(),
            destination.data_ptr(),
            pairs.data_ptr(),
            pairs.shape[0],
            source.stride(0) * source.element_size(),
            torch.get_num_threads(),
        )


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _places_of(masks: Mapping[int, np.ndarray], num_rows: int) -> "Array[c_void_p]":
    """Return the address of each row's mask; None for a row that has none."""
    places = (c_void_p * num_rows)()
    for row, mask in masks.items():
        places[row] = mask.ctypes.data
    return places


def _place(rows: Tensor) -> tuple[int, int, int]:
    """Return the address and the strides of a tensor from `_rows`."""
    token_stride, head_stride, _ = rows.stride()
    return rows.data_ptr(), token_stride, head_stride


def _of_heads(numbers: Tensor | None) -> Tensor | None:
    """Return one value per head, as C++ can read them."""
    return None if numbers is None else numbers.to(torch.float32).contiguous()


def _reference(cache: Tensor | None) -> Callable[[], Tensor | None]:
    """Return a weak reference to a tensor; for None, a function that returns None."""
    return _nothing if cache is None else weakref.ref(cache)


def _nothing() -> None:
    return None


def _check_block(cache: Tensor) -> None:
    """Raise ValueError if C++ would misread a cache's memory."""
    _, _, block_size, dim = cache.shape
    if cache.dtype not in _DTYPES | _FP8_DTYPES:
        known = ", ".join(map(str, _DTYPES | _FP8_DTYPES))
        raise ValueError(f"the cache is {cache.dtype}: it must be one of {known}")
    if cache.stride()[1:] != (block_size * dim, dim, 1):
        raise ValueError(f"a block must be contiguous: strides are {cache.stride()}")
    if block_size & (block_size - 1) or block_size < _UNIT or dim % _UNIT:
        raise ValueError(
            f"block size {block_size} must be a power of two from {_UNIT}, and head size "
            f"{dim} a multiple of {_UNIT}"
        )


def _fit(tokens: Tensor, cache: _CheckedCache, dim: int, slots: _CheckedSlots) -> Tensor:
    """Return keys or values, of `dim` elements, as C++ can read them.

    Raises:
        ValueError: They are not of the cache's shape and dtype.
    """
    if tokens.shape != (slots.count, cache.num_kv_heads, dim):
        raise ValueError(
            f"keys or values {list(tokens.shape)} do not fit {slots.count} slots "
            f"of a cache of {cache.num_kv_heads} heads of {dim}"
        )
    _check_dtype(tokens, cache)
    return _rows(tokens)


def _check_slot(bad: int, slot_mapping: Tensor, cache: _CheckedCache) -> None:
    """Raise IndexError if C++ found a slot, counted from 1, past the cache's end."""
    if bad:
        raise IndexError(
            f"token {bad - 1} goes to slot {int(slot_mapping[bad - 1])}, of {cache.num_slots}"
        )


def _check_table(bad: int, metadata: AttentionMetadata, cache: Tensor) -> None:
    """Raise IndexError if C++ found a sequence, counted from 1, with a bad block table."""
    if bad:
        raise IndexError(
            f"the block table of sequence {bad - 1}, {int(metadata.seq_lens[bad - 1])} tokens "
            f"long, does not hold enough blocks out of {cache.shape[0]}: "
            f"{metadata.block_tables[bad - 1].tolist()}"
        )


def _check_dtype(tokens: Tensor, cache: _CheckedCache) -> None:
    """Raise ValueError if C++ would misread the tokens' memory."""
    if tokens.dtype != cache.dtype or tokens.dtype not in _DTYPES:
        raise ValueError(f"tokens are {tokens.dtype} and the cache is for {cache.dtype}")


__all__ = ["CheckedCaches", "NativeKernels", "Spent"]
