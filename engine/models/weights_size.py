"""The memory of a model's weights, unquantized and quantized."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo.engine.attention.latent import absorbed_linears
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.models.experts.expert_layer import find_experts
from octavo.engine.models.experts.packed_experts import has_kernels as has_expert_kernels
from octavo.engine.models.linear.packed_linear import has_kernels, has_quantized_kernels
from octavo.engine.models.linear.plain_linears import plain_linears
from octavo.engine.models.quantization import find_scheme, schemes_for
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.formats.base import Format
from octavo.engine.models.quantization.on_gpu import tied_embeddings

EXPERT_PRODUCT = "down_proj"
"""The usual name of an expert's product, for look-ups in a config's lists of layers."""


def weight_bytes(
    model: PreTrainedModel, quantization: str, device: torch.device, stored: Format | None = None
) -> int:
    """Estimate the bytes of a model's loaded weights.

    Args:
        model: Transformers' model; its weights may be empty.
        quantization: Value of `EngineSettings.quantization`.
        device: The device that would run it.
        stored: The format of its checkpoint, if its weights are quantized.
    """
    total = sum(weight.nbytes for weight in chain(model.parameters(), model.buffers()))
    scheme = find_scheme(quantization)
    if device.type != "cpu":
        return total - _saved_on_gpu(model, scheme, stored)
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    saved = 0
    absorbed = absorbed_linears(model)
    for linear, expansion in absorbed.items():  # packed_latents.py stores two products of keys
        dims = expansion.key_dim + expansion.value_dim
        total += linear.get_parameter("weight").nbytes * expansion.key_dim // dims
    for layer in plain_linears(model) - absorbed.keys():
        assert isinstance(layer, nn.Linear)
        is_head = layer is head
        takes = scheme is not None and (scheme.takes_head or not is_head)
        now = layer.weight.itemsize * 8
        bits = scheme.bits(layer, is_head=is_head) if scheme is not None and takes else now
        saved += layer.weight.numel() * (now - bits) // 8
        if is_head and _is_tied(layer, model) and (takes or has_kernels(layer)):
            total += layer.weight.nbytes  # packed, beside the embeddings
    if scheme is not None:
        for experts in find_experts(model):
            bits_or_none = scheme.expert_bits(experts)
            if bits_or_none is not None:
                saved += experts.elements * (experts.dtype.itemsize * 8 - bits_or_none) // 8
    if stored is not None:
        saved += _saved_as_stored(model, stored)
    return total - saved


def why_no_room(weights: Mapping[str, int], quantization: str, free: int) -> str | None:
    """Return why a model's weights do not fit, and which would; None if they fit.

    Args:
        weights: The bytes of the weights, by quantization.
        quantization: The requested quantization.
        free: The free bytes.
    """
    taken = weights[quantization]
    if taken <= free:
        return None
    smaller = [
        f"--quantization {name} ({size / GIB:.1f} GiB)"
        for name, size in weights.items()
        if size <= free
    ]
    instead = f"or {' or '.join(smaller)}" if smaller else "or a smaller model"
    return (
        f"the weights take about {taken / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free: use more"
        f" memory, {instead}"
    )


def sizes_by_quantization(
    model: PreTrainedModel, device: torch.device, stored: Format | None
) -> dict[str, int]:
    """Estimate the bytes of a model's weights for each possible quantization.

    Args:
        model: See `weight_bytes`.
        device: See `weight_bytes`.
        stored: See `weight_bytes`.
    """
    names = ["none"] if stored is not None else ["none", *schemes_for(device)]
    return {name: weight_bytes(model, name, device, stored) for name in names}


def _saved_on_gpu(model: PreTrainedModel, scheme: Scheme | None, stored: Format | None) -> int:
    """Return the bytes that quantization saves on a GPU."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    left, saved = plain_linears(model) - absorbed_linears(model).keys(), 0
    names = tied_embeddings(model) if stored is not None and stored.packs_ends else {}
    for path, layer in model.named_modules():
        if layer not in left or not isinstance(layer, nn.Linear):
            continue
        is_head, bits = layer is head, None
        if scheme is not None and (scheme.takes_head or not is_head):
            bits = scheme.gpu_bits(is_head=is_head)
        elif stored is not None and stored.covers(names.get(layer, path)):
            bits = stored.gpu_bits(names.get(layer, path), layer.in_features)
        if bits is not None:
            weight_bits = layer.weight.itemsize * 8
            kept = weight_bits if is_head and _is_tied(layer, model) else 0  # by the embeddings
            saved += int(layer.weight.numel() * (weight_bits - bits - kept) / 8)
    for experts in find_experts(model):
        path, bits = f"{experts.path}.0.{EXPERT_PRODUCT}", None
        if scheme is not None:
            bits = scheme.gpu_bits(is_head=False)
        elif stored is not None and _takes_experts(stored, path):
            bits = stored.gpu_bits(path, experts.inner)
        if bits is not None:
            saved += int(experts.elements * (experts.dtype.itemsize * 8 - bits) / 8)
    return saved


def _saved_as_stored(model: PreTrainedModel, stored: Format) -> int:
    """Return the bytes saved by running a quantized checkpoint's weights as stored."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    left, saved = plain_linears(model) - absorbed_linears(model).keys() - {head}, 0
    for path, layer in model.named_modules():
        if layer in left and isinstance(layer, nn.Linear) and has_quantized_kernels(layer):
            bits = stored.kernel_bits(path, layer.in_features) if stored.covers(path) else None
            if bits is not None:
                saved += layer.weight.numel() * (layer.weight.itemsize * 8 - bits) // 8
    if stored.packs_ends:
        saved += _saved_at_ends(model, stored)
    for experts in find_experts(model):
        if experts.dtype != torch.bfloat16:
            continue
        path = f"{experts.path}.0.{EXPERT_PRODUCT}"
        bits = stored.kernel_bits(path, experts.inner) if _takes_experts(stored, path) else None
        if bits is not None and bits < 8 and has_expert_kernels(experts, torch.uint8):
            saved += experts.elements * (experts.dtype.itemsize * 8 - bits) // 8
    return saved


def _takes_experts(stored: Format, path: str) -> bool:
    """Return whether kernels may support a layer's experts as stored."""
    return stored.covers(path) and not stored.permutes_inputs(path)


def _saved_at_ends(model: PreTrainedModel, stored: Format) -> int:
    """Return the bytes saved by running embeddings and head as stored."""
    embeddings = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    saved = 0
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if layer not in {embeddings, head} or not isinstance(weight, torch.Tensor):
            continue
        if layer is head and isinstance(layer, nn.Linear) and _is_tied(layer, model):
            saved += weight.nbytes if has_kernels(layer) else 0  # shares the embeddings' blocks
        elif stored.covers(path):
            bits = stored.kernel_bits(path, weight.shape[1])
            saved += 0 if bits is None else weight.numel() * (weight.itemsize * 8 - bits) // 8
    return saved


def _is_tied(head: nn.Linear, model: PreTrainedModel) -> bool:
    return head in tied_embeddings(model)
