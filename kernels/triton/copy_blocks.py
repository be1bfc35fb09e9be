"""Copies whole blocks within the GPU's memory.

A block is contiguous, so this kernel copies 32-bit words, whatever their type.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.host_copies import to_device

_WORDS = 1024  # words that a program copies at a time
_MAX_PROGRAMS = 65_535  # CUDA's limit of a grid's second and third dimensions


# An odd number of pairs misaligns the second column; this must not compile another variant.
@triton.jit(do_not_specialize=["source_blocks", "destination_blocks"])
def _swap_blocks_kernel(  # noqa: PLR0917
    source,
    destination,
    source_blocks,
    destination_blocks,
    block_words,
    WORDS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    from_block = tl.load(source_blocks + pair)
    to_block = tl.load(destination_blocks + pair)
    for first in range(tl.program_id(1) * WORDS, block_words, tl.num_programs(1) * WORDS):
        word = first + tl.arange(0, WORDS)
        real = word < block_words
        moved = tl.load(source + from_block * block_words + word, mask=real)
        tl.store(destination + to_block * block_words + word, moved, mask=real)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a cache; see `octavo.kernels.ops.copy_blocks`."""
    swap_blocks(cache, cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks between caches on the GPU; see `octavo.kernels.ops.swap_blocks`."""
    numbers = to_device(pairs.t().contiguous().numpy(), source.device)
    source, destination = (x.view(x.shape[0], -1).view(torch.int32) for x in (source, destination))
    block_words = source.shape[1]
    programs = min(triton.cdiv(block_words, _WORDS), _MAX_PROGRAMS)
    _swap_blocks_kernel[(len(pairs), programs)](
        source, destination, numbers[0], numbers[1], block_words, WORDS=_WORDS
    )
