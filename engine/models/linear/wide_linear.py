"""A linear layer with float32 outputs: the head, on a GPU.

SmolLM2's greatest logits are near 25. In bfloat16, logits less than an eighth apart would round to
equal values, and any of them could count as the most likely.
"""

import torch
from torch import Tensor, nn

from octavo.engine.operators import define


class WideLinear(nn.Module):
    """A linear layer with float32 outputs.

    Args:
        linear: The layer to replace.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]` float32."""
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.octavo.wide_linear(rows, self.weight, self.bias)
        return out.reshape(*x.shape[:-1], -1)


def _on_gpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32:
        out = torch.mm(x, weight.t())
    else:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the same on a CPU, for tests only: an engine on a CPU uses `PackedLinear`."""
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), wide)


define(
    "wide_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
    CUDA=_on_gpu,
    CPU=_on_cpu,
)
