"""What the rest of the engine must know of a model."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model that memory and validation go by."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that a block of `block_size` tokens takes, all layers, K and V."""
        per_token = self.num_layers * 2 * self.num_kv_heads * self.head_dim
        return per_token * block_size * dtype.itemsize
