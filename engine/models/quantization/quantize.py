"""Linear layers in 8 or 4 bits, on CPU: fewer bytes and cheaper products.

`int8`: weights in 8 bits, a scale for each output; activations in 8 bits, a scale
and a zero point for each token, found as it comes (dynamic). Products of bytes run
at twice the rate of bfloat16 ones. Activations have outlying channels that would
take all 8 bits for themselves: each channel is divided by a factor that its weights
are multiplied by (SmoothQuant, Xiao et al. 2023, equation 4), found on a short text,
and so is its exponent, layer by layer: with one for all, SmolLM2's perplexity grows by
more than twice as much.

`int4`: weights in 4 bits, a scale and a zero point for every 32 inputs. Steps of a
few tokens, which wait for weights to arrive, read those; larger steps, which wait
for arithmetic, use the same values in 8 bits.

The last layer, from hidden states to logits, is the one that costs the most quality:
`int8` leaves it as it is, and `int4` takes 8 bits for it.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.library import register_fake
from transformers import PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.linear.fuse_linears import linears_by_input
from octavo.engine.models.linear.packed_linear import PackedLayer, has_kernels, replace
from octavo.engine.models.quantization.calibration import Inputs, calibrate
from octavo.engine.settings import Quantization
from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu.linear import GROUP, pad_outputs
from octavo.kernels.machine import onednn_int8_saturates

SMOOTHING = (0.3, 0.4, 0.5, 0.6, 0.7)
"""SmoothQuant's alpha: of these, each layer takes what loses it the least."""
LEVELS = (15, 14, 13, 12)
"""Steps between the least and the greatest weight of a group that are tried. Weights that
were in 4 bits before may not use the ends of their scale, and these find it again."""
LEAST_SHARE = 0.02
"""Of the weights: what is left of fewer, as routers are, is not worth a word."""
TINY = 1e-8  # keeps scales of nothing from dividing by zero


def quantize(
    model: PreTrainedModel, shape: ModelShape, path: str, quantization: Quantization
) -> None:
    """Replaces a model's linear layers; the last one as the module says.

    Args:
        model: changed in place.
        shape: its figures.
        path: where its tokenizer is.
        quantization: how; not "none".
    """
    inputs = calibrate(model, shape, path)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for group in linears_by_input(model):
        first = group[0]
        if first.layer is head and quantization == "int8":
            continue
        in_4_bits = quantization == "int4" and first.layer is not head
        make = make_int4 if in_4_bits and first.layer.in_features % GROUP == 0 else make_int8
        replace(model, group, partial(make, inputs=inputs[first.path]))


def unquantized(model: PreTrainedModel) -> dict[str, float]:
    """Return which kinds of layers `quantize` left as they are, embeddings and head apart.

    Experts that are one tensor for all, for which there are no kernels, are the usual case.

    Returns:
        Each kind's share of all weights, by the name of its class; none under `LEAST_SHARE`.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    left: Counter[str] = Counter()
    for module in model.modules():
        if module is not head and not isinstance(module, nn.Embedding):
            own = module.parameters(recurse=False)
            left[type(module).__name__] += sum(weight.numel() for weight in own if weight.dim() > 1)
    rounded = sum(held.numel() for held in model.buffers() if held.dtype == torch.int8)
    total = max(1, rounded + left.total())
    shares = {name: count / total for name, count in left.items()}
    return {name: share for name, share in shares.items() if share >= LEAST_SHARE}


def make_int8(linear: nn.Linear, inputs: Inputs) -> nn.Module:
    """A layer with dynamic 8-bit activations and 8-bit weights.

    Args:
        linear: the layer that it replaces.
        inputs: what it is given.
    """
    return _in_8_bits(linear, linear.weight.detach().float(), inputs)


class Rounded(NamedTuple):
    """Weights in 8 bits.

    Attributes:
        whole: `[out, in]` int8.
        scale: `[out]`, what these are multiplied by.
        factors: `[in]`, what inputs are multiplied by.
    """

    whole: Tensor
    scale: Tensor
    factors: Tensor


def _in_8_bits(
    linear: nn.Linear, weight: Tensor, inputs: Inputs
) -> "PackedInt8Linear | Int8Linear":
    candidates = (_round_to_8_bits(weight, inputs.reach, alpha) for alpha in SMOOTHING)
    rounded = min(candidates, key=partial(_loss, weight, inputs.samples))
    return (PackedInt8Linear if has_kernels(linear) else Int8Linear)(linear, *rounded)


def _round_to_8_bits(weight: Tensor, reach: Tensor, alpha: float) -> Rounded:
    """Smooths weights for inputs of that reach, and rounds them."""
    widest = weight.abs().amax(0).clamp_min(TINY)
    smooth = (reach.clamp_min(1e-5) ** alpha / widest ** (1 - alpha)).clamp_min(1e-4)
    weight = weight * smooth
    scale = weight.abs().amax(1).clamp_min(TINY) / 127
    return Rounded((weight / scale[:, None]).round_().to(torch.int8), scale, 1 / smooth)


def _loss(weight: Tensor, samples: Tensor, rounded: Rounded) -> float:
    """The share of its length that a row of outputs is off by, on average."""
    exact = samples @ weight.T
    whole, step, zero = _round_rows(samples * rounded.factors)
    found = (whole - zero) * step @ (rounded.whole * rounded.scale[:, None]).T
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(TINY)).mean())


def _round_rows(rows: Tensor, most: int = 255) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds each row to whole numbers from 0 to `most`, for each its own step and zero."""
    least = rows.amin(1, keepdim=True).clamp_max(0)
    greatest = rows.amax(1, keepdim=True).clamp_min(0)
    step = ((greatest - least) / most).clamp_min(TINY)
    zero = (-least / step).round()
    return ((rows / step).round() + zero).clamp(0, most), step, zero


class PackedInt8Linear(PackedLayer):
    """An 8-bit layer for the kernels of `octavo.kernels.cpu.linear`.

    Args:
        linear: the layer that it replaces.
        whole: its weights, rounded.
        scale: what they are multiplied by.
        factors: what inputs are multiplied by.
    """

    panels: Tensor
    factors: Tensor
    scale: Tensor
    row_sums: Tensor

    def __init__(self, linear: nn.Linear, whole: Tensor, scale: Tensor, factors: Tensor) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.register_buffer("panels", kernels.pack(whole))
        self.register_buffer("factors", factors)
        self.register_buffer("scale", pad_outputs(scale))
        self.register_buffer("row_sums", pad_outputs(whole.sum(1, dtype=torch.int32) * scale))

    def multiply(self, rows: Tensor) -> Tensor:
        """Maps `[rows, in_features]` to `[rows, outputs]`."""
        out: Tensor = torch.ops.octavo.packed_linear_int8(
            *(rows, self.outputs, self.panels, self.bias),
            *(self.factors, self.scale, self.row_sums, int(self.gated)),
        )
        return out


class Int8Linear(nn.Module):
    """An 8-bit layer for oneDNN.

    Args:
        linear: the layer that it replaces.
        whole: its weights, rounded.
        scale: what they are multiplied by.
        factors: what inputs are multiplied by.
    """

    weight: Tensor
    scale: Tensor
    factors: Tensor
    row_sums: Tensor
    no_zero_points: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, whole: Tensor, scale: Tensor, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", whole)
        self.register_buffer("scale", scale)
        self.register_buffer("factors", factors)
        self.register_buffer("row_sums", whole.sum(1, dtype=torch.int32) * scale)
        self.register_buffer("no_zero_points", torch.zeros(len(scale), dtype=torch.int32))
        self.register_buffer("bias", _bias(linear))
        # Of 7 bits, two products with weights of 8 bits are within 16 bits together.
        self._most = 127 if onednn_int8_saturates() else 255
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`, of the same dtype."""
        rows = x.reshape(-1, x.shape[-1]).float()
        whole, step, zero = _round_rows(rows * self.factors, self._most)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(whole.to(torch.uint8), 1.0, 0, self._pack(), self.scale, self.no_zero_points),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        out = (product - zero * self.row_sums) * step
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _pack(self) -> Tensor:
        """The weights in oneDNN's order; the compiler does this once and keeps the result."""
        if self._packed is not None:
            return self._packed
        packed: Tensor = torch.ops.onednn.qlinear_prepack(self.weight, None)
        if not torch.compiler.is_compiling():
            self._packed = packed
        return packed


def make_int4(linear: nn.Linear, inputs: Inputs) -> nn.Module:
    """A layer with 4-bit weights, which steps of many tokens use as 8-bit ones.

    Where there are no kernels for 4 bits, all steps do.

    Args:
        linear: the layer that it replaces; its inputs must be a multiple of `GROUP`.
        inputs: what it is given.
    """
    weight = linear.weight.detach()
    whole, scale, zero = _round_to_4_bits(weight.float(), weight.dtype)
    values = (whole - 8) * scale.float() + zero.float()
    in_8_bits = _in_8_bits(linear, values.flatten(1), inputs)
    if not isinstance(in_8_bits, PackedInt8Linear):
        return in_8_bits
    return PackedInt4Linear(linear, in_8_bits, whole, scale[..., 0], zero[..., 0])


class PackedInt4Linear(PackedLayer):
    """A 4-bit layer for the kernels of `octavo.kernels.cpu.linear`.

    Args:
        linear: the layer that it replaces.
        in_8_bits: the same weights in 8 bits.
        whole: `[out, groups, GROUP]`, the weights rounded to 0 to 15.
        scale: `[out, groups]`.
        zero: as scale; a weight is `(whole - 8) * scale + zero`.
    """

    nibbles: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        in_8_bits: PackedInt8Linear,
        whole: Tensor,
        scale: Tensor,
        zero: Tensor,
    ) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.in_8_bits = in_8_bits
        self.register_buffer("nibbles", kernels.pack_int4(whole, scale, zero))

    def multiply(self, rows: Tensor) -> Tensor:
        """Maps `[rows, in_features]` to `[rows, outputs]`."""
        many = self.in_8_bits
        out: Tensor = torch.ops.octavo.packed_linear_int4(
            *(rows, self.outputs, many.panels, self.bias),
            *(many.factors, many.scale, many.row_sums, self.nibbles, int(self.gated)),
        )
        return out


def _bias(linear: nn.Linear) -> Tensor | None:
    bias: Tensor | None = linear.bias  # declared as always there, and often is not
    return None if bias is None else bias.detach().float()


def _round_to_4_bits(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds each group of weights to 16 levels, spaced to lose the least.

    Returns:
        `[out, groups, GROUP]` 0 to 15; `[out, groups, 1]` scales and `[out,
        groups, 1]` zeros, of `dtype`: a weight is `(whole - 8) * scale + zero`.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least_error = torch.full_like(least, torch.inf)
    for levels in LEVELS:
        scale = ((greatest - least) / levels).clamp_min(TINY).to(dtype)
        zero = (least + 8 * scale.float()).to(dtype)
        whole = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15)
        error = ((whole - 8) * scale.float() + zero.float() - groups).square().sum(-1, keepdim=True)
        if best is None:
            best = whole, scale, zero
        else:
            better = error < least_error
            best = (
                torch.where(better, whole, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, zero, best[2]),
            )
        least_error = torch.minimum(error, least_error)
    assert best is not None
    return best


@register_fake("onednn::qlinear_prepack")  # type: ignore[untyped-decorator]
def _fake_prepack(weight: Tensor, _shape: list[int] | None) -> Tensor:
    """PyTorch has none: it packs after tracing. oneDNN's order is `[in, out]`."""
    return weight.new_empty(weight.shape[1], weight.shape[0])
