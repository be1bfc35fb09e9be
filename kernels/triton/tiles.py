"""Tile sizes of the attention kernel.

Rules give the default sizes. `python -m benchmarks.gpu --tune` times other sizes on this GPU and
writes them to tuned.json, which overrides the rules. An engine does not tune: no step waits for a
trial, and CUDA graphs keep their sizes.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton

from octavo.kernels.gpu import Gpu

WorkKind = Literal["decode", "chunk"]

MIN_ROWS = 16
"""Minimum rows of a matrix product."""
TUNED = Path(__file__).with_name("tuned.json")


WIDE = 256
"""Maximum elements of a key that is multiplied at once, if they are not a power of two."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer.

    Attributes:
        group: Query heads per KV head.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        latent: Whether a key's first elements are its value.
    """

    group: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def main(self) -> int:
        """Elements of a key in the first part of its product."""
        if self.latent:
            return self.value_dim
        if self.key_dim <= WIDE:
            return self.key_dim
        return 1 << self.key_dim.bit_length() - 1

    @property
    def padded_main(self) -> int:
        """Elements of the first part, padded for matrix units."""
        return _padded(self.main)

    @property
    def padded_rest(self) -> int:
        """Elements of a key's second part, padded; 0 if there is none."""
        return _padded(self.key_dim - self.main) if self.key_dim > self.main else 0

    @property
    def padded_value(self) -> int:
        """Elements of a value, padded."""
        return _padded(self.value_dim)

    @property
    def padded_key(self) -> int:
        """Elements of both parts of a key, padded."""
        return self.padded_main + self.padded_rest

    @property
    def padded(self) -> int:
        """Padded elements of a key or of a value, whichever is more; the rules use this number."""
        return max(self.padded_main, self.padded_value)


def _padded(dim: int) -> int:
    power: int = triton.next_power_of_2(dim)
    return max(MIN_ROWS, power)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a program.

    Attributes:
        rows: Query rows, (token, head of the group) pairs; a power of two from 16.
        keys: Keys per tile; a power of two from 16.
        warps: Warps per program.
        stages: Stages of the software pipeline that fetches keys and values.
    """

    rows: int
    keys: int
    warps: int
    stages: int


RESIDENT = 2
"""Decode programs that share a multiprocessor's memory: one computes while another waits."""

MAX_REGISTERS = 256
"""Registers per thread; programs on matrix units use most of them."""
FEW_REGISTERS = 128
"""Maximum registers per thread for float32 tiles with few rows on NVIDIA's GPUs."""

WIDE_REGISTERS = 512
"""Maximum registers per thread for heads of more than `WIDE` elements on AMD's GPUs."""

FLOAT32 = torch.float32.itemsize
WIDE_WARP = 64
"""Threads per warp of AMD's data-centre GPUs (CDNA); RDNA GPUs have 32, as NVIDIA's."""

COPIED = 16
"""Bytes that a thread copies to shared memory at once, on NVIDIA's GPUs."""
SCRATCH = 1 << 10
"""Bytes of shared memory for communication between warps."""
FEW_WARPS = 4
"""Warps of a decode program that does not compute in float32."""
PADDED_PART = 32
"""Maximum share of shared memory left as gaps against bank conflicts, on AMD's GPUs."""


@cache
def choose_tiles(
    kind: WorkKind, gpu: Gpu, heads: Heads, *, dtype: torch.dtype, cache_dtype: torch.dtype
) -> Tiles:
    """Return the sizes for a kind of work.

    Args:
        kind: "decode" of one token per sequence, or "chunk" of a prompt.
        gpu: The GPU.
        heads: The layer's heads.
        dtype: Dtype of queries.
        cache_dtype: Dtype of keys and values.
    """
    tuned = _tuned().get(tuning_key(kind, gpu, heads, dtype=dtype, cache_dtype=cache_dtype))
    if tuned is not None:
        return tuned
    rows = _padded(heads.group)
    size = max(dtype.itemsize, cache_dtype.itemsize)
    wide = max(heads.padded, heads.padded_key if kind == "decode" else 0) > WIDE
    if wide:
        few = kind == "decode" and rows == MIN_ROWS
        tiles = _wide_tiles(gpu, few=few, latent=heads.latent, sizes=(size, cache_dtype.itemsize))
    else:
        rules = _amd_tiles if gpu.is_amd else _nvidia_tiles
        tiles = rules(kind, gpu, rows=rows, padded=heads.padded, size=size)
    if not gpu.is_amd and cache_dtype.itemsize > 1 and heads.padded_rest:
        tiles = _copied_whole(tiles, gpu, heads.padded_rest * cache_dtype.itemsize)
    shared_bytes = gpu.shared_bytes
    alone = wide and (gpu.is_amd or tiles.warps > FEW_WARPS)
    if kind == "decode" and not alone:
        shared_bytes = (shared_bytes + gpu.reserved_bytes) // RESIDENT - gpu.reserved_bytes
    while tiles.stages > 1 and _needed(tiles, gpu, heads, dtype, cache_dtype) > shared_bytes:
        tiles = replace(tiles, stages=tiles.stages - 1)
    return tiles


def _copied_whole(tiles: Tiles, gpu: Gpu, row_bytes: int) -> Tiles:
    """Return tiles in which each thread copies at least `COPIED` bytes of keys' second parts.

    If many rows' operands come from registers, more keys would spill them.
    """
    if tiles.rows >= 64 and not gpu.multiplies_in_place:
        return tiles
    return replace(tiles, keys=max(tiles.keys, COPIED * gpu.warp_size * tiles.warps // row_bytes))


def _nvidia_tiles(kind: WorkKind, gpu: Gpu, *, rows: int, padded: int, size: int) -> Tiles:
    """Return the rules' sizes for an NVIDIA GPU.

    Args:
        kind: "decode" of one token per sequence, or "chunk" of a prompt.
        gpu: The GPU.
        rows: Rows that one token's head group fills.
        padded: Elements of a key or a value, a power of two.
        size: Bytes of an element of queries or of the cache, whichever is larger.
    """
    row_bytes = padded * size
    if kind == "decode":
        # Bound by memory: small tiles, as many in flight as shared memory holds.
        rows = min(rows, 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 32)
        keys = max(16, min(128, (16 << 10) // row_bytes))
        if rows > 64:
            return Tiles(rows, min(keys, 64), warps=8, stages=4)
        return Tiles(rows, keys, warps=8 if size == FLOAT32 else 4, stages=6)
    if size == FLOAT32:  # no tensor cores: registers are the limit
        return Tiles(32, 32 if padded <= 64 else 16, warps=8, stages=2)
    if padded <= 128:
        # If operands come from registers, registers are the limit.
        # On Hopper, Triton ends all products before it computes the softmax. So for 64 keys 1,024
        # cycles of products and 742 of other instructions add up, to 58% of the products' rate
        # (`python -m benchmarks.gpu.roofline`). Two programs of 64 rows would overlap, but read
        # all keys twice: 2,300 cycles of the L2 cache. Tiles of 128 keys need 580 cycles (64%),
        # but spill up to 72 bytes: `--tune` tries them. Triton specializes warps on Blackwell
        # only; a tensor descriptor copies one block, where a product needs a tile in one piece.
        keys = 64 if gpu.multiplies_in_place or padded <= 64 else 32
        return Tiles(128, keys, warps=8, stages=4)
    return Tiles(64, 32, warps=8, stages=4)


def _amd_tiles(kind: WorkKind, gpu: Gpu, *, rows: int, padded: int, size: int) -> Tiles:
    """Return the rules' sizes for an AMD GPU.

    Every warp of a program multiplies all of a tile's keys, so that registers are the limit. The
    arguments are those of `_nvidia_tiles`.
    """
    if gpu.warp_size < WIDE_WARP:
        return _narrow_amd_tiles(kind, rows=rows, padded=padded, size=size)
    if kind == "decode":
        rows = min(rows, 64)
        tile_bytes = (16 if rows <= MIN_ROWS and size < FLOAT32 else 8) << 10
        keys = max(16, min(64, tile_bytes // (padded * size)))
        return Tiles(rows, keys, warps=8 if size == FLOAT32 or rows > 32 else 4, stages=2)
    if size == FLOAT32:
        return Tiles(32, 32 if padded <= 64 else 16, warps=8, stages=2)
    if padded <= 128:
        return Tiles(128, 32, warps=8, stages=2)
    return Tiles(64, 16, warps=8, stages=2)


def _narrow_amd_tiles(kind: WorkKind, *, rows: int, padded: int, size: int) -> Tiles:
    """Return the rules' sizes for an AMD GPU with warps of 32 threads.

    A thread has 256 registers at most, and both halves of a warp hold the same operands. So no
    registers remain to fetch a tile ahead; other programs compute during the fetch.
    """
    if padded > 128:
        return Tiles(32, 16, warps=16, stages=1)
    if size == FLOAT32:
        return Tiles(MIN_ROWS, 16, warps=8, stages=1)
    keys = 16 if padded > 64 else 32
    if kind == "decode":
        return Tiles(min(rows, 32), keys, warps=4 if rows <= MIN_ROWS else 8, stages=1)
    return Tiles(32 if padded > 64 else 64, keys, warps=8, stages=1)


def _wide_tiles(gpu: Gpu, *, few: bool, latent: bool, sizes: tuple[int, int]) -> Tiles:
    """Return the rules' sizes for heads of more than `WIDE` elements.

    Queries and sums fill the registers, so a multiprocessor runs one program of many rows. Latent
    keys need half as much shared memory as keys and values.

    Args:
        gpu: The GPU.
        few: Whether a decode fills only the minimum of rows.
        latent: Whether there is no value cache.
        sizes: Bytes of an element of queries or cache, whichever is larger; and of the cache.
    """
    size, cached = sizes
    if gpu.is_amd and gpu.warp_size < WIDE_WARP:
        return Tiles(MIN_ROWS, 16, warps=16, stages=1)
    if size == FLOAT32:
        return Tiles(MIN_ROWS, 16, *((4, 1) if gpu.is_amd else (8, 2)))
    # Converting fp8 takes registers, too.
    if gpu.is_amd:
        if few or cached == 1:
            return Tiles(MIN_ROWS, 16, warps=4, stages=2)
        return Tiles(32, 16, warps=8, stages=2)
    if few:
        return Tiles(MIN_ROWS, 32 if latent and cached > 1 else 16, warps=4, stages=6)
    return Tiles(32, 32, warps=8, stages=4)


def count_resident(
    tiles: Tiles, gpu: Gpu, heads: Heads, *, dtype: torch.dtype, cache_dtype: torch.dtype
) -> int:
    """Return a lower bound on the programs that a multiprocessor runs concurrently.

    Decodes leave room for a second program; prompt chunks have more warps and use all registers.
    """
    needed = _needed(tiles, gpu, heads, dtype, cache_dtype)
    by_memory = (gpu.shared_bytes + gpu.reserved_bytes) // (needed + gpu.reserved_bytes)
    few = dtype == torch.float32 and tiles.rows <= MIN_ROWS and not gpu.is_amd
    registers = FEW_REGISTERS if few else MAX_REGISTERS
    if gpu.is_amd and heads.padded_key > WIDE:
        registers = WIDE_REGISTERS
    registers *= gpu.warp_size * tiles.warps
    return max(1, min(by_memory, gpu.registers // registers))


def _needed(
    tiles: Tiles, gpu: Gpu, heads: Heads, dtype: torch.dtype, cache_dtype: torch.dtype
) -> int:
    """Return a program's bytes of shared memory: queries, weights and the pipeline's tiles."""
    queries = tiles.rows * heads.padded_key * dtype.itemsize
    weights = tiles.rows * tiles.keys * dtype.itemsize
    elements = heads.padded_key + (0 if heads.latent else heads.padded_value)
    tile = tiles.keys * elements * cache_dtype.itemsize
    if gpu.is_amd:
        return _needed_on_amd(tiles, gpu, queries, weights, tile)
    # Products that read their operands from shared memory need one more tile.
    in_place = gpu.multiplies_in_place and tiles.rows >= 64 and dtype != torch.float32
    return SCRATCH + queries + weights + (tiles.stages - 1 + in_place) * tile


def _needed_on_amd(tiles: Tiles, gpu: Gpu, queries: int, weights: int, tile: int) -> int:
    """Return a program's bytes of shared memory if queries move to registers before the loop.

    Args:
        tiles: The program's sizes.
        gpu: The GPU.
        queries: Bytes of its queries.
        weights: Bytes of a tile's weights.
        tile: Bytes of a tile's keys and values.
    """
    buffers = max(1, tiles.stages - 1)
    padding = 0
    if gpu.copies_to_shared and tiles.stages > 1:
        buffers += 1  # the buffer that copies write to
        padding = buffers * tile // PADDED_PART
    if tiles.rows <= MIN_ROWS and tiles.warps == FEW_WARPS:
        weights = 0  # each warp computes all of them
    return max(queries, weights + buffers * tile + padding)


def tuning_key(
    kind: WorkKind, gpu: Gpu, heads: Heads, *, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str:
    """Return the key of a case in tuned.json; groups that fill the same number of rows share it."""
    names = (str(kind).removeprefix("torch.") for kind in (dtype, cache_dtype))
    sizes = str(heads.key_dim)
    if heads.latent or heads.key_dim != heads.value_dim:
        sizes += f"{'>' if heads.latent else '+'}{heads.value_dim}"
    return "/".join((gpu.name, kind, str(_padded(heads.group)), sizes, *names))


def use_tiles(case: str, tiles: Tiles | None) -> None:
    """Override the sizes of a case, named by `tuning_key`; None restores the rules."""
    _tuned().pop(case, None)
    if tiles is not None:
        _tuned()[case] = tiles
    choose_tiles.cache_clear()


@cache
def _tuned() -> dict[str, Tiles]:
    if not TUNED.exists():
        return {}
    return {key: Tiles(**sizes) for key, sizes in json.loads(TUNED.read_text()).items()}
