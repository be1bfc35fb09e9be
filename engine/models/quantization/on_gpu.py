"""Quantization of linear layers on a GPU: at load, and of checkpoints that are quantized.

A layer's weights are made where the model was loaded, which is the CPU if the GPU has no room for
it, and moved to the GPU one layer at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.linear.fuse_linears import (
    LocatedLinear,
    group_linears_by_input,
    share,
    split_alike,
)
from octavo.engine.models.linear.plain_linears import replace_conv1d
from octavo.engine.models.linear.quantized_linear import Fp8Linear, QuantizedLinear, bias_of
from octavo.engine.models.quantization.checkpoints.base import (
    ZERO_OF_BYTES,
    Integers,
    ScaledFp8,
    StoredWeight,
)
from octavo.engine.models.quantization.checkpoints.gguf import Blocks
from octavo.engine.models.quantization.checkpoints.reader import QuantizedCheckpoint, log_widened
from octavo.engine.models.quantization.rounding import EPSILON, round_to_4_bits
from octavo.kernels import ops
from octavo.kernels.cpu.linear import GROUP
from octavo.kernels.quantized import (
    FP8_MULTIPLE,
    LARGEST,
    Numbers,
    QuantizedWeight,
    join,
    make_weight,
    takes_group,
)

FP8_TOLERANCE = 0.35
"""Of the self-check, where inputs are rounded to fp8."""


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A layer's weights as GPUs' kernels take them.

    Attributes:
        weight: The weights.
        order: `[inputs]` int64, the input of each column; None if they are in order.
        as_fp8: `[outputs, inputs]` e4m3 and `[outputs]` float32 scales, if inputs may be rounded to
            fp8 too.
    """

    weight: QuantizedWeight
    order: Tensor | None = None
    as_fp8: tuple[Tensor, Tensor] | None = None

    def fits(self, other: "GpuWeight") -> bool:
        """Return whether the weights of two layers of the same input can be joined."""
        if (self.as_fp8 is None) != (other.as_fp8 is None):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order and self.weight.fits(other.weight)
        return torch.equal(self.order, other.order) and self.weight.fits(other.weight)


def round_to_int8(weight: Tensor) -> GpuWeight:
    """Round each output's weights, `[outputs, inputs]`, to bytes with one scale."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(EPSILON) / 127
    codes = (wide / scale).round_().to(torch.int8)
    return GpuWeight(make_weight(codes, scale, group=wide.shape[1], numbers=Numbers.BYTES))


def round_to_int4(weight: Tensor) -> GpuWeight:
    """Round groups of `GROUP` weights to 4 bits; outputs without whole groups to bytes."""
    if weight.shape[1] % GROUP:
        return round_to_int8(weight)
    codes, scale, offset = round_to_4_bits(weight.float(), weight.dtype)
    made = make_weight(
        codes.flatten(1).to(torch.uint8),
        scale[..., 0],
        group=GROUP,
        numbers=Numbers.NIBBLES,
        zero_point=8,
        offset=offset[..., 0],
    )
    return GpuWeight(made)


def round_to_fp8(weight: Tensor) -> GpuWeight:
    """Round each output's weights to e4m3 with one scale."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(EPSILON) / LARGEST
    codes = (wide / scale[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return fp8_weight(codes, scale[:, None], wide.shape[1])


def fp8_weight(codes: Tensor, scale: Tensor, group: int) -> GpuWeight:
    """Return weights in e4m3; with `[outputs, groups]` scales of groups of inputs."""
    made = make_weight(codes, scale, group=group, numbers=Numbers.E4M3)
    whole = scale.shape[1] == 1
    return GpuWeight(made, as_fp8=(codes, scale[:, 0].float()) if whole else None)


def stored_weight(stored: StoredWeight) -> GpuWeight | None:
    """Return a checkpoint's weight as the kernels take it; None if they do not."""
    if isinstance(stored, Integers):
        return _integers(stored)
    if isinstance(stored, ScaledFp8):
        group = stored.codes.shape[1] if stored.block is None else stored.block[1]
        if not takes_group(group, stored.codes.shape[1]):
            return None
        return fp8_weight(stored.codes, stored.scale_of_outputs(), group)
    return _blocks(stored) if isinstance(stored, Blocks) else None


def _integers(stored: Integers) -> GpuWeight | None:
    inputs, groups = stored.codes.shape[1], stored.scale.shape[1]
    if not takes_group(inputs // groups, inputs):
        return None
    order = stored.order()
    codes = stored.codes if order is None else stored.codes[:, order]
    nibbles = stored.bits <= 4
    shift = 0 if nibbles else ZERO_OF_BYTES
    zero_points = stored.zero - shift
    shared = float(zero_points.flatten()[0])
    alike = bool((zero_points == shared).all())
    made = make_weight(
        codes if nibbles else (codes.short() - shift).to(torch.int8),
        stored.scale,
        group=inputs // groups,
        numbers=Numbers.NIBBLES if nibbles else Numbers.BYTES,
        zero_point=int(shared) if alike else 0,
        zero_points=None if alike else zero_points,
    )
    return GpuWeight(made, order)


def _blocks(stored: Blocks) -> GpuWeight:
    own, fields = stored.format, stored.fields()
    codes = fields.codes.flatten(1)
    nibbles = own.bits == 4
    zero_point = 0 if own.has_min or own.bits == 8 else 1 << (own.bits - 1)
    scale, offset, outer = fields.scale, fields.least, None
    if fields.scales is not None:
        small = fields.scales.view(torch.int8) if own.bits == 6 else fields.scales
        least = None if fields.least is None else -fields.least
        outer = (fields.scale, least)
        scale = small.flatten(1)
        offset = None if fields.mins is None else fields.mins.flatten(1)
    made = make_weight(
        codes if nibbles else codes.view(torch.int8),
        scale,
        group=own.group,
        numbers=Numbers.NIBBLES if nibbles else Numbers.BYTES,
        zero_point=zero_point,
        offset=offset,
        outer=outer,
    )
    return GpuWeight(made)


def quantize_on_gpu(
    model: PreTrainedModel,
    device: torch.device,
    round_weight: Callable[[Tensor, bool], GpuWeight | None],
) -> None:
    """Replace a model's linear layers by quantized ones.

    Args:
        model: Changed in place.
        device: Where the layers are to be.
        round_weight: Rounds a weight, `[outputs, inputs]`; its second argument is whether it is the
            head's. None leaves the layer as it is.
    """
    replace_conv1d(model)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    groups = group_linears_by_input(model)
    while groups:
        group = groups.pop()  # frees it once it is replaced
        is_head = group[0].layer is head
        weights = [round_weight(own.layer.weight.detach(), is_head) for own in group]
        found = [one for one in weights if one is not None]
        if len(found) == len(group):
            share(group, _make(group, found, device, is_head=is_head))


def pack_checkpoint_on_gpu(
    model: PreTrainedModel, checkpoint: QuantizedCheckpoint, device: torch.device
) -> float:
    """Replace the layers whose weights GPUs' kernels take as they are stored.

    Args:
        model: A model with the checkpoint's weights dequantized; changed in place.
        checkpoint: Its checkpoint.
        device: Where the layers are to be.

    Returns:
        The tolerance of the self-check; see `Scheme`.
    """
    replace_conv1d(model)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings = tied_embeddings(model)
    tolerance, packed = 0.0, 0
    groups = group_linears_by_input(model)
    while groups:
        whole = groups.pop()
        paths = [embeddings.get(own.layer, own.path) for own in whole]
        found = [_find(*own, checkpoint) for own in zip(whole, paths, strict=True)]
        for group, weights in split_alike(whole, found):
            made = _make(group, weights, device, is_head=group[0].layer is head)
            if isinstance(made, Fp8Linear):
                tolerance = FP8_TOLERANCE
            packed += sum(located.layer.weight.numel() for located in group)
            share(group, made)
    log_widened(checkpoint, packed, model.dtype)
    return tolerance


def tied_embeddings(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the name of the input embeddings by the head, if they are tied; else nothing."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: nn.Module = model.get_input_embeddings()
    if head is None or getattr(embeddings, "weight", None) is not getattr(head, "weight", head):
        return {}
    path = next(path for path, own in model.named_modules() if own is embeddings)
    return {head: path}


def _find(located: LocatedLinear, path: str, checkpoint: QuantizedCheckpoint) -> GpuWeight | None:
    """Return a layer's quantized weights; None if the file has none, or others than the layer."""
    name = f"{path}.weight"
    if name not in checkpoint.shapes:
        return None
    stored, weight = checkpoint.read(name), located.layer.weight.detach()
    same = torch.equal(stored.dequantize().to(weight.dtype), weight.cpu())
    return stored_weight(stored) if same else None


def _make(
    group: list[LocatedLinear], weights: list[GpuWeight], device: torch.device, *, is_head: bool
) -> nn.Module:
    """Return one layer of several layers' weights."""
    first = weights[0]
    layers = [located.layer for located in group]
    bias, dtype = bias_of(layers), layers[0].weight.dtype
    outputs, inputs = sum(layer.out_features for layer in layers), layers[0].in_features
    fp8 = [own.as_fp8 for own in weights if own.as_fp8 is not None]
    takes_fp8 = fp8 and not is_head and not outputs % FP8_MULTIPLE and not inputs % FP8_MULTIPLE
    if takes_fp8 and ops.has_fp8_products(device, dtype):
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in fp8]).view(fp8[0][0].dtype)
        return Fp8Linear(codes, torch.cat([scale for _, scale in fp8])[None], bias).to(device)
    weight = join([own.weight for own in weights])
    return QuantizedLinear(weight, bias, wide=is_head, order=first.order).to(device)
