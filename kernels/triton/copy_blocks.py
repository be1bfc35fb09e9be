"""Copies whole blocks: within the GPU's cache, and between it and CPU memory.

A block is contiguous, so to these kernels it is a run of 32-bit words, whatever
it holds. Scattered blocks are gathered into one staging tensor, so that the bus
carries one long transfer and not many short ones.
"""

# Triton reads its kernels' source: types there are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu

_WORDS = 1024  # words of a block that one program moves


@triton.jit
def _move_blocks_kernel(  # noqa: PLR0917
    source,
    destination,
    source_blocks,  # or, where unused, anything
    destination_blocks,
    block_words,
    GATHER: tl.constexpr,  # source block i is source_blocks[i], else i
    SCATTER: tl.constexpr,  # destination block i is destination_blocks[i], else i
    WORDS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    from_block = tl.load(source_blocks + pair) if GATHER else pair
    to_block = tl.load(destination_blocks + pair) if SCATTER else pair
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    real = word < block_words
    moved = tl.load(source + from_block * block_words + word, mask=real)
    tl.store(destination + to_block * block_words + word, moved, mask=real)


def _move(
    source: Tensor,
    destination: Tensor,
    source_blocks: Tensor | None,
    destination_blocks: Tensor | None,
) -> None:
    """Copies blocks `[n, ...]` on one device, from and to the numbers given, else in order."""
    numbers = source_blocks if source_blocks is not None else destination_blocks
    if numbers is None:
        raise ValueError("give the source blocks, the destination blocks or both")
    source, destination = (x.view(x.shape[0], -1).view(torch.int32) for x in (source, destination))
    block_words = source.shape[1]
    _move_blocks_kernel[(len(numbers), triton.cdiv(block_words, _WORDS))](
        source,
        destination,
        numbers if source_blocks is None else source_blocks,
        numbers if destination_blocks is None else destination_blocks,
        block_words,
        GATHER=source_blocks is not None,
        SCATTER=destination_blocks is not None,
        WORDS=_WORDS,
    )


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Returns `[n, ...]`, a contiguous copy of the blocks numbered `[n]` int64."""
    staging = torch.empty((len(blocks), *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    _move(cache, staging, blocks, None)
    return staging


def scatter_blocks(staging: Tensor, cache: Tensor, blocks: Tensor) -> None:
    """Writes `[n, ...]` to the blocks numbered `[n]` int64."""
    _move(staging, cache, None, blocks)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks within a cache; see `kernels.ops.copy_blocks`."""
    # One transfer, and rows that are contiguous.
    columns = pairs.t().contiguous().to(cache.device)
    _move(cache, cache, columns[0], columns[1])


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks between devices, or on one; see `kernels.ops.swap_blocks`."""
    count = len(pairs)
    order = torch.arange(count)
    if source.device == destination.device:
        columns = pairs.t().contiguous().to(source.device)
        _move(source, destination, columns[0], columns[1])
    elif source.device.type == "cuda":
        arrived = gather_blocks(source, pairs[:, 0].contiguous().to(source.device)).cpu()
        cpu.swap_blocks(arrived, destination, torch.stack((order, pairs[:, 1]), 1))
    else:
        leaving = torch.empty((count, *source.shape[1:]), dtype=source.dtype, pin_memory=True)
        cpu.swap_blocks(source, leaving, torch.stack((pairs[:, 0], order), 1))
        blocks = pairs[:, 1].contiguous().to(destination.device)
        scatter_blocks(leaving.to(destination.device), destination, blocks)
