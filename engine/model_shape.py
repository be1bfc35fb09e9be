"""The dimensions of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from octavo.kernels.metadata import AttentionPlan
from octavo.kernels.ops import plan_attention

Planner = Callable[[np.ndarray, np.ndarray], AttentionPlan | None]
"""`octavo.kernels.ops.plan_attention` for one model: maps query and sequence lengths to a plan."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's dimensions, for memory and validation."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block of `block_size` tokens: all layers, K and V."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * block_size * dtype.itemsize

    def planner(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
    ) -> Planner:
        """Return the planner of this model's attention; see `plan_attention`."""
        return partial(
            plan_attention,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            device=device,
        )
