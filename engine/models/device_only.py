"""Replaces transformers' code that copies between host and GPU on each step.

Such a step waits for the GPU, and cannot be recorded as a CUDA graph.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from transformers import PreTrainedModel

from octavo.engine.models.rope import FIXED


def keep_on_device(model: PreTrainedModel) -> None:
    """Replace such code; results stay the same bit for bit.

    Args:
        model: A model on a GPU, in the dtype of its steps; changed in place.
    """
    for module in list(model.modules()):
        if getattr(module, "activation_sparsity", 0) and hasattr(module, "_gaussian_topk"):
            _fix_sparsity(module, model.dtype)
        for name, child in module.named_children():
            if type(child).__name__ == "PhimoeRotaryEmbedding" and child.rope_type == FIXED:
                setattr(module, name, _PhimoeRope(child))


def _fix_sparsity(mlp: Any, dtype: torch.dtype) -> None:  # noqa: ANN401 - Gemma3nTextMLP
    """Compute the threshold of Gemma 3n's gates once; transformers copies it on each step."""
    sparsity = torch.tensor(mlp.activation_sparsity, dtype=torch.float32)
    deviations: Tensor = Normal(0, 1).icdf(sparsity)  # type: ignore[no-untyped-call]
    mlp._gaussian_topk = partial(_largest, float(deviations.to(dtype)))  # noqa: SLF001


def _largest(deviations: float, gates: Tensor) -> Tensor:
    """Subtract a threshold from gates, at zero or above.

    Args:
        deviations: Number of standard deviations from a row's mean to its threshold.
        gates: `[..., inner]`.
    """
    spread = torch.std(gates, dim=-1, keepdim=True, unbiased=False)
    return nn.functional.relu(gates - (gates.mean(dim=-1, keepdim=True) + spread * deviations))


class _PhimoeRope(nn.Module):
    """Phi-3.5-MoE's LongRoPE: transformers reads the longest position to choose its scale.

    `fix_rope` refuses a context in which the scale would change.
    """

    inv_freq: Tensor

    def __init__(self, rope: Any) -> None:  # noqa: ANN401 - PhimoeRotaryEmbedding
        super().__init__()
        frequencies = rope.rope_init_fn(rope.config)[0].to(rope.inv_freq.device, torch.float32)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self._scale = rope.config.rope_parameters["short_mscale"]

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, `[batch, tokens, rotated]`."""
        angles = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)
