"""A linear layer that gives float32: the last one, to logits, on a GPU.

Rounded to bfloat16, logits near 25, as SmolLM2's greatest are, are equal unless they are
an eighth apart, and the most likely token is any of these.
"""

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake


class WideLinear(nn.Module):
    """A layer with the weights of another one.

    Args:
        linear: the layer that it replaces.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., out_features]` float32."""
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
    """For tests: an engine on CPU has kernels of its own."""
    wide = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), wide)


_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "wide_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
_library.impl("wide_linear", _on_gpu, "CUDA")  # type: ignore[no-untyped-call]
_library.impl("wide_linear", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
register_fake(
    "octavo::wide_linear",
    lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
)
