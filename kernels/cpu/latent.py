"""Weights of latent attention, packed once for latent_attention.cpp."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu.linear import LinearKernels

_UNIT = 8
"""All dimensions are multiples of it."""


class PackedLatents(NamedTuple):
    """The packed weights that turn latents into keys and values.

    Attributes:
        absorbing: `[num_heads, panels, words, ...]`: maps queries of keys to queries of latents.
        keys: `[num_heads, panels, words, ...]`: maps latents to the first elements of keys.
        values: `[num_heads, panels, words, ...]`: maps latents to values.
        value_dim: Elements of a value.
        rotated: Elements of a key that the cache keeps beside the latent.
    """

    absorbing: Tensor
    keys: Tensor
    values: Tensor
    value_dim: int
    rotated: int


class LatentKernels:
    """Packs weights for `latent_attention`.

    Args:
        linear: The kernels for linear layers.
    """

    def __init__(self, linear: LinearKernels) -> None:
        self._linear = linear

    @staticmethod
    def takes(dims: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return whether the kernel supports latents, keys and values of these sizes."""
        known = {torch.float32, torch.bfloat16}
        return dtype in known and all(dim % _UNIT == 0 for dim in dims)

    def pack(self, weight: Tensor) -> Tensor:
        """Pack `[num_heads, outputs, inputs]`; see `LinearKernels.pack`."""
        return torch.stack([self._linear.pack(matrix) for matrix in weight])
