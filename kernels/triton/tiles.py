"""Tile sizes of the attention kernel.

These rules are the start of tuning: `python -m benchmarks.gpu --tune` times other sizes on this
GPU, and its results in tuned.json override these rules. An engine does not tune: no step waits for
a trial, and CUDA graphs keep their sizes.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton

Kind = Literal["decode", "chunk"]

LEAST_ROWS = 16
"""Minimum rows of a matrix product."""
TUNED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of a program.

    Attributes:
        rows: Query rows, (token, head of the group) pairs; a power of two from 16.
        keys: Keys per tile; a power of two from 16.
        warps: Warps per program.
        stages: Depth of the software pipeline that fetches keys and values.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that the sizes depend on.

    Attributes:
        name: The driver's name of it.
        capability: Compute capability.
        shared_bytes: Maximum shared memory of a program.
        multiprocessors: Number of multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int

    @property
    def multiplies_in_place(self) -> bool:
        """Whether matrix units read operands from shared memory instead of registers.

        It is so on Hopper (9) and data-centre Blackwell (10, 11), not on desktop Blackwell (12).
        """
        return self.capability[0] in {9, 10, 11}


RESIDENT = 2
"""Decode programs that share a multiprocessor's memory: one computes while another waits."""

REGISTERS = 64 << 10
"""Registers of a multiprocessor."""
MAX_REGISTERS = 256
"""Registers of a thread. Programs on matrix units use most of these."""
FEW_REGISTERS = 128
"""Maximum registers of a thread for float32 tiles with few rows."""

RESERVED = 1 << 10
"""Bytes of shared memory per program that the system reserves."""
SCRATCH = 1 << 10
"""Bytes of shared memory for communication between warps."""

INTERPRETER = Gpu("interpreter", (8, 0), 99 << 10, 4)
"""The GPU of Triton's interpreter, small enough that tests split sequences."""


@cache
def gpu(device: torch.device) -> Gpu:
    """Return the properties of the current GPU; `device` must be it."""
    if device.type != "cuda":
        return INTERPRETER
    index = torch.cuda.current_device()  # where Triton launches
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Gpu(
        torch.cuda.get_device_name(index),
        torch.cuda.get_device_capability(index),
        found["max_shared_mem"],
        found["multiprocessor_count"],
    )


@cache
def choose_tiles(
    kind: Kind, gpu: Gpu, *, group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> Tiles:
    """Return the sizes for a kind of work.

    Args:
        kind: "decode" of one token per sequence, or "chunk" of a prompt.
        gpu: The GPU.
        group: Query heads per KV head.
        head_dim: Elements per head.
        dtype: Of queries.
        cache_dtype: Of keys and values.
    """
    padded = triton.next_power_of_2(head_dim)
    rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    case = tuning_key(
        kind, gpu, group=group, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype
    )
    tuned = _tuned().get(case)
    if tuned is not None:
        return tuned
    row_bytes = padded * max(dtype.itemsize, cache_dtype.itemsize)
    if kind == "decode":
        # Bound by memory: small tiles, as many in flight as shared memory holds.
        rows = min(rows, 128 if row_bytes <= 256 else 64 if row_bytes <= 512 else 32)
        keys = max(16, min(128, (16 << 10) // row_bytes))
        if rows > 64:
            tiles = Tiles(rows, min(keys, 64), warps=8, stages=4)
        else:
            warps = 8 if dtype == torch.float32 else 4
            tiles = Tiles(rows, keys, warps, stages=6)
        shared_bytes = (gpu.shared_bytes + RESERVED) // RESIDENT - RESERVED
    else:
        if dtype == torch.float32:  # no tensor cores: registers are the limit
            rows, keys, stages = 32, 32 if padded <= 64 else 16, 2
        elif padded <= 128:
            # If operands come from registers, these are the limit.
            rows, keys, stages = 128, 64 if gpu.multiplies_in_place or padded <= 64 else 32, 4
        else:
            rows, keys, stages = 64, 32, 4
        tiles = Tiles(rows, keys, warps=8, stages=stages)
        shared_bytes = gpu.shared_bytes
    while tiles.stages > 1 and _needed(tiles, gpu, padded, dtype, cache_dtype) > shared_bytes:
        tiles = replace(tiles, stages=tiles.stages - 1)
    return tiles


def count_resident(
    tiles: Tiles, gpu: Gpu, *, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> int:
    """Return a lower bound of the programs that a multiprocessor runs concurrently.

    Decodes leave room for a second program; prompt chunks have more warps and use all registers.
    """
    padded = triton.next_power_of_2(head_dim)
    needed = _needed(tiles, gpu, padded, dtype, cache_dtype)
    by_memory = (gpu.shared_bytes + RESERVED) // (needed + RESERVED)
    few = dtype == torch.float32 and tiles.rows <= LEAST_ROWS
    by_registers = REGISTERS // (32 * tiles.warps * (FEW_REGISTERS if few else MAX_REGISTERS))
    return max(1, min(by_memory, by_registers))


def _needed(
    tiles: Tiles, gpu: Gpu, padded: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> int:
    """Return a program's bytes of shared memory: queries, weights and the pipeline's tiles."""
    queries = tiles.rows * padded * dtype.itemsize
    weights = tiles.rows * tiles.keys * dtype.itemsize
    # Products that read their operands from shared memory need one more tile.
    in_place = gpu.multiplies_in_place and tiles.rows >= 64 and dtype != torch.float32
    buffers = tiles.stages - 1 + in_place
    return SCRATCH + queries + weights + 2 * buffers * tiles.keys * padded * cache_dtype.itemsize


def tuning_key(
    kind: Kind, gpu: Gpu, *, group: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str:
    """Return the key of a case in tuned.json; groups that fill the same rows are one case."""
    rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    names = (str(kind).removeprefix("torch.") for kind in (dtype, cache_dtype))
    return "/".join((gpu.name, kind, str(rows), str(head_dim), *names))


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
