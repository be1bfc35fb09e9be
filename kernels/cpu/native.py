"""The compiled kernels on a CPU: sets the step that operators in C++ read, and calls them."""

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
    c_int,
    c_int32,
    c_void_p,
    pointer,
)
from operator import is_

import torch
from torch import Tensor

from octavo.kernels.cpu.blocks import BlockKernels
from octavo.kernels.cpu.caches import (
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
from octavo.kernels.cpu.latent import LatentKernels, PackedLatents
from octavo.kernels.cpu.library import load_library
from octavo.kernels.cpu.linear import LinearKernels
from octavo.kernels.cpu.low_rank import LowRankStructs
from octavo.kernels.cpu.program import Programs
from octavo.kernels.cpu.rounding import RoundingKernels
from octavo.kernels.cpu.spill import SpillKernels
from octavo.kernels.cpu.states import StateKernels
from octavo.kernels.cpu.sums import RankSums
from octavo.kernels.low_rank import LowRankBatch, StepAdapters
from octavo.kernels.metadata import AttentionMetadata, StateCache
from octavo.kernels.state_rows import StateRows
from octavo.kernels.widths import width_of_values

_operators = torch.ops.octavo_cpu
_GROUPS = _WRITTEN = (c_int32 * 1)(0)  # of a step with one layer, which is not written


class _Step(Structure):
    """A step's caches and batches; the same as in operators.h."""

    _fields_ = (
        *(("layers", POINTER(Cache)), ("groups", POINTER(c_int32)), ("written", POINTER(c_int32))),
        *(("states", POINTER(State)), ("batches", POINTER(Batch))),
    )


class Spent(Structure):
    """Seconds that steps spent in operators; the same as in operators.h."""

    _fields_ = tuple((name, c_double) for name in ("attention", "linear", "states"))


class NativeKernels:
    """The kernels of `octavo.kernels.ops`, in C++. Several threads may call them.

    Raises:
        OSError: They cannot be compiled on this machine.

    Attributes:
        linear: Packer of linear layers' weights.
        blocks: Packer of weights in GGUF's formats.
        latents: Packer of latent attention's weights.
        rounding: The kernels that round weights.
        states: The kernels for layers that keep a state.
        experts: Packer of mixtures of experts.
        programs: The operators, and the builder of programs of operators.
        sums: The sum over ranks.
        spill: Opens readers of files of spilled blocks.
        isa: Name in isa.cpp of the instruction set that the kernels use.
    """

    def __init__(self) -> None:
        library = load_library()
        library.octavo_isa.restype = c_char_p
        self.isa = library.octavo_isa().decode()
        self.programs = Programs(library)
        self._pin, self._take_spent = library.octavo_pin_threads, library.octavo_take_spent
        self._pin.argtypes = (c_void_p, c_void_p, c_int)
        self._take_spent.restype = Spent
        self._set_step, self._set_adapters = library.octavo_set_step, library.octavo_set_adapters
        self._set_step.argtypes, self._set_step.restype = (POINTER(_Step),), None
        self._set_adapters.argtypes, self._set_adapters.restype = (c_void_p,), None
        panel = int(library.octavo_panel_outputs())
        self.linear = LinearKernels(_operators, panel)
        self.blocks, self.rounding = BlockKernels(_operators, panel), RoundingKernels(_operators)
        self.experts, self.latents = ExpertKernels(library, self.linear), LatentKernels(self.linear)
        self.states, self.sums = StateKernels(self._set_states), RankSums(library)
        self.spill = SpillKernels(library)
        self._adapters = LowRankStructs()
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
        cache = self._check_cache(key_cache, value_cache, key.dtype, (key_scale, value_scale))
        kept = self._set_layer(cache, _slots_of(slot_mapping))
        _operators.write_kv(_rows(key), None if value is None else _rows(value), 0)
        del kept

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
        cache = self._check_cache(key_cache, value_cache, key.dtype, (key_scale, value_scale))
        kept = self._set_layer(cache, _slots_of(slot_mapping))
        angles = (angle.to(torch.float32).contiguous() for angle in (cos, sin))
        rotated: Tensor = _operators.rotate_and_write(*map(_rows, (query, key, value)), *angles, 0)
        del kept
        return rotated

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
        cache = self._check_cache(key_cache, value_cache, query.dtype, (key_scale, value_scale))
        kept = self._set_layer(cache, self._check_batches([metadata]))
        out: Tensor = _operators.attend(
            *(_rows(query), width_of_values(key_cache, value_cache, value_dim), 0, scale),
            *(sliding_window or 0, soft_cap or 0.0, chunk or 0),
            *(_of_heads(sinks), _of_heads(alibi_slopes)),
        )
        del kept
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
        kept = self._set_layer(cache, self._check_batches([metadata]))
        query = _rows(query)
        out: Tensor = _operators.latent_attention(
            *(query, query, *products, 0, scale),  # the second one, a key, is not written
            *(sliding_window or 0, soft_cap or 0.0, chunk or 0),
        )
        del kept
        return out

    def set_step(self, caches: CheckedCaches, groups: Sequence[AttentionMetadata]) -> object:
        """Set this thread's step for the operators that programs call.

        The arguments and the returned object must outlive those calls.
        """
        batches = self._check_batches(groups)
        parts = caches.layers, caches.groups, caches.written, caches.states, batches
        self._set_step(byref(_Step(*parts)))
        return parts

    def set_adapters(self, adapters: StepAdapters | None) -> object:
        """Set this thread's adapters for packed layers; None for none.

        The argument and the returned object must stay alive until they are set again.
        """
        struct = None if adapters is None else self._adapters.make(adapters)
        self._set_adapters(None if struct is None else addressof(struct))
        return struct

    def _set_layer(self, cache: CheckedCache, batches: "Array[Batch]") -> object:
        """Set a step of one layer, which is not written; return the memory it points to."""
        parts = pointer(cache.struct), _GROUPS, _WRITTEN, None, batches
        self._set_step(byref(_Step(*parts)))
        return parts

    def _set_states(self, rows: StateRows) -> object:
        """Set a step of one state; return the memory it points to."""
        tables, state = rows.tables, make_state(StateCache(rows.state, rows.first_row, 0))
        batch = Batch(
            *(rows.query_starts.data_ptr(), rows.seq_lens.data_ptr(), tables.data_ptr()),
            *(tables.stride(0), tables.shape[1], tables.shape[0]),
        )
        step = _Step(states=pointer(state), batches=pointer(batch))
        self._set_step(byref(step))
        return step

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

    @staticmethod
    def add_low_rank(out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
        """Add low-rank products; see `octavo.kernels.ops.add_low_rank`."""
        _operators.add_low_rank(out, x, batch.records[layer], batch.rows, batch.tiles)

    def copy_blocks(self, cache: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
        self.swap_blocks(cache, cache, pairs)

    @staticmethod
    def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks between caches in CPU memory; see `ops.swap_blocks`."""
        if source.shape[1:] != destination.shape[1:] or source.dtype != destination.dtype:
            raise ValueError(
                f"blocks of {list(source.shape[1:])} {source.dtype} cannot be copied to blocks "
                f"of {list(destination.shape[1:])} {destination.dtype}"
            )
        if not (source.is_contiguous() and destination.is_contiguous()):
            raise ValueError("caches must be contiguous")
        block_bytes = source.stride(0) * source.element_size()
        _operators.copy_blocks(source, destination, pairs.long().contiguous(), block_bytes)


def _slots_of(slot_mapping: Tensor) -> "Array[Batch]":
    """Return a batch of slots alone."""
    slots, count = check_slots(slot_mapping)
    return (Batch * 1)(Batch(slots=slots, num_tokens=count))


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _of_heads(numbers: Tensor | None) -> Tensor | None:
    """Return one value per head, as C++ can read them."""
    return None if numbers is None else numbers.to(torch.float32).contiguous()
