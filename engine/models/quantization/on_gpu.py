"""Quantizes a model for a GPU, at load or from a quantized checkpoint.

A layer's weights are packed on the device where the model was loaded (the CPU, if the GPU has no
room for it), and moved to the GPU one layer at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.deferred import held, present
from octavo.engine.models.experts.expert_layer import find_experts
from octavo.engine.models.linear.fuse_linears import (
    LocatedLinear,
    group_linears_by_input,
    share,
    split_alike,
)
from octavo.engine.models.linear.plain_linears import replace_conv1d
from octavo.engine.models.linear.quantized_linear import Fp8Linear, QuantizedLinear, bias_of
from octavo.engine.models.quantization.experts_on_gpu import pack_experts, round_experts
from octavo.engine.models.quantization.formats.report import log_widened
from octavo.engine.models.quantization.gpu_weight import GpuWeight, stored_weight
from octavo.engine.models.read_weights import QuantizedCheckpoint, find_stored
from octavo.kernels import ops
from octavo.kernels.quantized import FP8_MULTIPLE, join

FP8_TOLERANCE = 0.35
"""Tolerance of the self-check if inputs are rounded to fp8."""


def quantize_on_gpu(
    model: PreTrainedModel,
    device: torch.device,
    round_weight: Callable[[Tensor, bool], GpuWeight | None],
) -> None:
    """Replace a model's linear layers and experts by quantized ones.

    Args:
        model: The model; changed in place.
        device: The device for the layers.
        round_weight: Rounds a weight, `[outputs, inputs]`; its second argument is whether it is the
            head's. None as a result leaves the layer unchanged.
    """
    replace_conv1d(model)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    groups = group_linears_by_input(model)
    while groups:
        group = groups.pop()  # frees each once replaced
        is_head = group[0].layer is head
        weights = [
            round_weight(present(located.layer.weight.detach()), is_head) for located in group
        ]
        rounded = [one for one in weights if one is not None]
        if len(rounded) == len(group):
            share(group, _make(group, rounded, device, is_head=is_head))
    for layer in find_experts(model):
        with held(layer.module):
            if made := round_experts(layer, device, lambda weight: round_weight(weight, False)):
                layer.replace(made)


def pack_checkpoint_on_gpu(
    model: PreTrainedModel, checkpoint: QuantizedCheckpoint, device: torch.device
) -> float:
    """Replace the layers whose stored weights the GPU kernels support unchanged.

    Args:
        model: A model with the checkpoint's weights dequantized; changed in place.
        checkpoint: Its checkpoint.
        device: The device for the layers.

    Returns:
        The tolerance of the self-check; see `Scheme`.
    """
    replace_conv1d(model)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tolerance, packed = 0.0, 0
    groups = group_linears_by_input(model)
    while groups:
        whole = groups.pop()
        stored = [stored_weight(find_stored(each.layer.weight)) for each in whole]
        for group, weights in split_alike(whole, stored):
            made = _make(group, weights, device, is_head=group[0].layer is head)
            if isinstance(made, Fp8Linear):
                tolerance = FP8_TOLERANCE
            packed += sum(located.layer.weight.numel() for located in group)
            share(group, made)
    for layer in find_experts(model):
        with held(layer.module):
            if experts := pack_experts(layer, checkpoint, device):
                packed += layer.elements
                layer.replace(experts)
    log_widened(model, checkpoint, packed)
    return tolerance


def tied_embeddings(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the input embeddings' name by the head, if they are tied; else an empty mapping."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: nn.Module = model.get_input_embeddings()
    if head is None or getattr(embeddings, "weight", None) is not getattr(head, "weight", head):
        return {}
    path = next(path for path, module in model.named_modules() if module is embeddings)
    return {head: path}


def _make(
    group: list[LocatedLinear], weights: list[GpuWeight], device: torch.device, *, is_head: bool
) -> nn.Module:
    """Join the weights of several layers into one layer."""
    first = weights[0]
    layers = [located.layer for located in group]
    bias, dtype = bias_of(layers), layers[0].weight.dtype
    outputs, inputs = sum(layer.out_features for layer in layers), layers[0].in_features
    fp8 = [rounded.as_fp8 for rounded in weights if rounded.as_fp8 is not None]
    takes_fp8 = fp8 and not is_head and not outputs % FP8_MULTIPLE and not inputs % FP8_MULTIPLE
    if takes_fp8 and ops.has_fp8_products(device, dtype):
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in fp8]).view(fp8[0][0].dtype)
        return Fp8Linear(codes, torch.cat([scale for _, scale in fp8])[None], bias).to(device)
    weight = join([rounded.weight for rounded in weights])
    return QuantizedLinear(weight, bias, wide=is_head, order=first.order).to(device)
