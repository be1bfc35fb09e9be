"""The compiled kernels on a CPU: passes the pointers and strides of tensors to C++."""

import itertools
import weakref
from collections.abc import Sequence
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
    pointer,
)
from operator import is_
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.cpu.blocks import BlockKernels
from octavo.kernels.cpu.caches import (
    DTYPES,
    Batch,
    Cache,
    CheckedCache,
    CheckedCaches,
    State,
    check_slots,
    make_batch,
    make_state,
)
from octavo.kernels.cpu.experts import ExpertKernels
from octavo.kernels.cpu.latent import LatentKernels, LatentProducts, PackedLatents
from octavo.kernels.cpu.library import load_library
from octavo.kernels.cpu.linear import LinearKernels
from octavo.kernels.cpu.logits import LogitKernels
from octavo.kernels.cpu.low_rank import LowRankKernels
from octavo.kernels.cpu.program import Programs
from octavo.kernels.cpu.rounding import RoundingKernels
from octavo.kernels.cpu.states import StateKernels
from octavo.kernels.cpu.sums import RankSums
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.metadata import AttentionMetadata, StateCache
from octavo.kernels.state_rows import StateRows
from octavo.kernels.widths import width_of_values


class _Step(Structure):
    """A step's caches and batches; the same as in operators.h."""

    _fields_ = (
        *(("layers", POINTER(Cache)), ("groups", POINTER(c_int32)), ("written", POINTER(c_int32))),
        *(("states", POINTER(State)), ("batches", POINTER(Batch))),
        *(("adapters", c_void_p), ("threads", c_int32)),
    )


class Spent(Structure):
    """Seconds that steps spent in operators; the same as in operators.h."""

    _fields_ = tuple((name, c_double) for name in ("attention", "linear", "states"))


class NativeKernels:
    """The kernels of `octavo.kernels.ops`, in C++. Several threads may call them.

    Raises:
        OSError: They cannot be compiled on this machine.

    Attributes:
        logits: The kernels for logits.
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
        rows, pointers = (c_void_p, c_int64, c_int64), (c_void_p, c_void_p)
        batch, sight = (POINTER(Cache), POINTER(Batch), *rows), (c_float, c_int, c_int, c_float)
        self._attend = library.octavo_paged_attention
        self._attend_latents = library.octavo_latent_attention
        self._write, self._rotate = library.octavo_write_kv, library.octavo_rotate_and_write
        self._copy, self._pin = library.octavo_copy_blocks, library.octavo_pin_threads
        self._set_step, self._take_spent = library.octavo_set_step, library.octavo_take_spent
        latents, slots = POINTER(LatentProducts), (c_void_p, c_int64)
        functions: tuple[tuple[Any, Any, tuple[Any, ...]], ...] = (
            (self._attend, c_int, (*batch, c_int, c_void_p, c_int, *sight, *pointers, c_int)),
            (self._attend_latents, c_int, (*batch, c_int, c_int, latents, c_void_p, *sight, c_int)),
            (self._write, c_int64, (POINTER(Cache), *rows, *rows, *slots, c_int)),
            (
                *(self._rotate, c_int64),
                (
                    *(POINTER(Cache), *rows, c_int, *rows, *rows, *pointers, c_int64),
                    *(*slots, c_void_p, c_int),
                ),
            ),
            (self._copy, None, (*pointers, c_void_p, c_int64, c_int64, c_int)),
            (self._pin, c_int, (*pointers, c_int)),
            (self._set_step, None, (POINTER(_Step),)),
            (self._take_spent, Spent, ()),
        )
        for function, result, arguments in functions:
            function.argtypes, function.restype = arguments, result
        self.low_rank, self.logits = LowRankKernels(library), LogitKernels(library)
        self.linear = linear = LinearKernels(library, self.low_rank)
        self.blocks, self.experts = BlockKernels(library, linear), ExpertKernels(library, linear)
        self.states, self.sums = StateKernels(self._run_on_states), RankSums(library)
        self.latents, self.rounding = LatentKernels(linear), RoundingKernels(library)
        self.programs = Programs(library)
        self._caches: dict[int, CheckedCache] = {}
        # The latest call's batches, and their structs.
        self._batches: tuple[Sequence[AttentionMetadata], Array[Batch]] | None = None

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
        slots, count = check_slots(slot_mapping)
        key = _fit(key, cache, cache.key_dim, count)
        if value is not None:
            value = _fit(value, cache, cache.value_dim, count)
        elif cache.value_dim:
            raise ValueError("the cache has values and none are given")
        bad = self._write(
            *(cache.reference, *_place(key), *((None, 0, 0) if value is None else _place(value))),
            *(slots, count, torch.get_num_threads()),
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
        slots, count = check_slots(slot_mapping)
        key = _fit(key, cache, cache.key_dim, count)
        value = _fit(value, cache, cache.value_dim, count)
        if len(query) != count or query.shape[2] != cache.key_dim:
            raise ValueError(
                f"query {list(query.shape)} does not fit {count} slots of heads of {cache.key_dim}"
            )
        _check_dtype(query, cache)
        query = _rows(query)
        cos, sin = (angle.to(torch.float32).contiguous() for angle in (cos, sin))
        out = torch.empty(query.shape, dtype=cache.dtype)
        bad = self._rotate(
            *(cache.reference, *_place(query), query.shape[1], *_place(key), *_place(value)),
            *(cos.data_ptr(), sin.data_ptr(), cos.stride(0)),
            *(slots, count, out.data_ptr(), torch.get_num_threads()),
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
        batch = self._check_batches([metadata])
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
            batch,
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
        batch = self._check_batches([metadata])
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
            *(cache.reference, batch, *_place(query), num_heads, query_dim),
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
            *(caches.layers, caches.groups, caches.written, caches.states, batches),
            *(None if struct is None else addressof(struct), torch.get_num_threads()),
        )
        return step, struct

    def _run_on_states(self, name: str, rows: StateRows, arguments: list[Any]) -> Tensor:
        """Run an operator on states that are not a traced step's.

        Raises:
            IndexError: A table names a block that is not in the cache.
        """
        if not len(arguments[0]):  # an operator takes an empty result for one without memory
            return torch.empty_like(arguments[2 if name == "gated_delta" else 0])
        tables, state = rows.tables, make_state(StateCache(rows.state, rows.first_row, 0))
        batch = Batch(
            *(rows.query_starts.data_ptr(), rows.seq_lens.data_ptr(), tables.data_ptr()),
            *(tables.stride(0), tables.shape[1], tables.shape[0]),
        )
        step = _Step(states=pointer(state), batches=pointer(batch), threads=torch.get_num_threads())
        self._set_step(byref(step))
        try:
            return self.programs.run(name, arguments)
        except RuntimeError as error:
            raise IndexError(
                f"a table names a block of a state that is not in the cache's {len(rows.state)}:"
                f" {tables.tolist()}"
            ) from error

    def take_spent(self) -> Spent:
        """Return the seconds that this thread's steps spent in operators since the last call."""
        spent: Spent = self._take_spent()
        return spent

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

    def _check_batches(self, groups: Sequence[AttentionMetadata]) -> "Array[Batch]":
        """Return the structs of batches; check these once for all layers."""
        known = self._batches
        if known is None or len(known[0]) != len(groups) or not all(map(is_, known[0], groups)):
            known = self._batches = groups, (Batch * len(groups))(*map(make_batch, groups))
        return known[1]

    def _check_cache(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None,
        dtype: torch.dtype,
        scales: tuple[float, float],
    ) -> CheckedCache:
        """Return a layer's checked cache; check it the first time."""
        cache = self._caches.get(id(key_cache))
        if cache is None or not cache.is_of(key_cache, value_cache, dtype, scales):
            cache = CheckedCache(key_cache, value_cache, dtype, scales)
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


def _place(rows: Tensor) -> tuple[int, int, int]:
    """Return the address and the strides of a tensor from `_rows`."""
    token_stride, head_stride, _ = rows.stride()
    return rows.data_ptr(), token_stride, head_stride


def _of_heads(numbers: Tensor | None) -> Tensor | None:
    """Return one value per head, as C++ can read them."""
    return None if numbers is None else numbers.to(torch.float32).contiguous()


def _fit(tokens: Tensor, cache: CheckedCache, dim: int, count: int) -> Tensor:
    """Return keys or values, of `dim` elements, as C++ can read them.

    Raises:
        ValueError: They are not of the cache's shape and dtype.
    """
    if tokens.shape != (count, cache.num_kv_heads, dim):
        raise ValueError(
            f"keys or values {list(tokens.shape)} do not fit {count} slots "
            f"of a cache of {cache.num_kv_heads} heads of {dim}"
        )
    _check_dtype(tokens, cache)
    return _rows(tokens)


def _check_slot(bad: int, slot_mapping: Tensor, cache: CheckedCache) -> None:
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


def _check_dtype(tokens: Tensor, cache: CheckedCache) -> None:
    """Raise ValueError if C++ would misread the tokens' memory."""
    if tokens.dtype != cache.dtype or tokens.dtype not in DTYPES:
        raise ValueError(f"tokens are {tokens.dtype} and the cache is for {cache.dtype}")


__all__ = ["NativeKernels", "Spent"]
