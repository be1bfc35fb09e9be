"""Linear layers of quantized weights on a GPU."""

import torch
from torch import Tensor, nn

from octavo.engine.models.linear.fuse_linears import LocatedLinear, share
from octavo.kernels import ops
from octavo.kernels.quantized import QuantizedWeight


class QuantizedLinear(nn.Module):
    """A layer whose kernel unpacks its weights; inputs stay in 16 bits.

    Args:
        weight: Its weights.
        bias: `[outputs]`, if any.
        wide: Whether to return float32, which logits need; see `wide_linear.py`.
        order: `[inputs]` int64, the input of each column of the weights; None: they are in order.
    """

    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        wide: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.wide = wide
        self.num_weights = weight.outputs * weight.inputs
        self._rest = weight.with_tensors(lambda own: own.new_empty(0))
        for name, own in weight._asdict().items():
            if isinstance(own, Tensor):
                self.register_buffer(name, own)
        self.register_buffer("bias", bias)
        self.register_buffer("order", order)

    @property
    def quantized(self) -> QuantizedWeight:
        """Its weights, where the layer is."""
        buffers = self._buffers
        own = (buffers.get(name, value) for name, value in self._rest._asdict().items())
        return QuantizedWeight(*own)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`, of the same dtype or float32."""
        rows = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        dtype = torch.float32 if self.wide else None
        out = ops.quantized_linear(rows, self.quantized, self.bias, dtype)
        return out.reshape(*x.shape[:-1], -1)


class Fp8Linear(nn.Module):
    """A layer of products in fp8, for which each row of inputs is rounded.

    Args:
        codes: `[outputs, inputs]` e4m3.
        scale: `[1, outputs]` float32.
        bias: `[outputs]`, if any.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_weights = codes.numel()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`, of the same dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out = ops.fp8_linear(rows, self.codes, self.scale, self.bias)
        return out.reshape(*x.shape[:-1], -1)


def bias_of(layers: list[nn.Linear]) -> Tensor | None:
    """Return the biases of layers of the same input as one; None if they have none."""
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    own = [bias.detach() for bias in biases if bias is not None]
    return torch.cat(own) if own else None


def put(group: list[LocatedLinear], layer: nn.Module) -> None:
    """Replace linear layers of the same input by one, of which each takes its outputs.

    Args:
        group: The layers.
        layer: Has all of their outputs, in order.
    """
    if len(group) == 1:
        setattr(group[0].parent, group[0].name, layer)
    else:
        share(group, layer)
