"""The matrices of the LoRA adapter that the self-check applies; see `adapter_reference.py`."""

import zlib

import torch
from torch import Tensor

MIN_RANK, RANKS = 3, 6
"""Ranks of the matrices, which differ between layers."""


def trial_matrices(name: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return the trial adapter's matrices of a layer, the same at every start.

    Args:
        name: The layer's name in transformers' model.
        inputs: Number of its inputs.
        outputs: Number of its outputs.

    Returns:
        A, `[rank, inputs]`, and B, `[outputs, rank]`: float32 values that bfloat16 and float16
        represent exactly.
    """
    seed = zlib.crc32(name.encode())
    draw = torch.Generator().manual_seed(seed)
    rank = MIN_RANK + seed % RANKS
    shapes = (rank, inputs), (outputs, rank)
    down, up = (torch.randint(-64, 65, shape, generator=draw) / 64 for shape in shapes)
    return down, up
