"""Tells layers that only multiply by their weights from those that do more.

Only the former may be joined, packed or quantized. GPT-2's `Conv1D` is one under another name.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.common.models.errors import ModelError
from octavo.engine.settings import Quantization

ROWS = 8
"""Of inputs, on which a layer is compared with the product."""


def plain_linears(model: nn.Module) -> set[nn.Module]:
    """Return a model's linear layers that compute the product with their weights, no more.

    Classes that inherit from `nn.Linear` are judged by what the first layer of each computes.
    """
    kinds: dict[type, bool] = {nn.Linear: True}
    found: set[nn.Module] = set()
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        kind = type(layer)
        if kind not in kinds:
            kinds[kind] = kind.forward is nn.Linear.forward or _is_product(layer)
        if kinds[kind]:
            found.add(layer)
    return found


def replace_conv1d(model: PreTrainedModel) -> None:
    """Replace each `Conv1D`, whose weights are transposed, by the linear layer that it is.

    Args:
        model: changed in place.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                setattr(parent, name, _as_linear(layer))


def check_quantizable(model: PreTrainedModel, path: str, quantization: Quantization) -> None:
    """Refuse a model whose layers already quantize their weights or inputs.

    Args:
        model: as loaded.
        path: where it is.
        quantization: as set, not "none".

    Raises:
        ModelError: the message names the method, or the layers' class.
    """
    hint = f"--quantization {quantization} is for models in bfloat16, float16 or float32"
    if own := getattr(model.config, "quantization_config", None):
        raise ModelError(f"{path} is quantized already ({_method(own)}): {hint}")
    plain = plain_linears(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer not in plain and _looks_like_product(layer):
            name = type(layer).__name__
            raise ModelError(f"{path} has {name} layers, which are no plain linear layers: {hint}")


def _method(own: object) -> str:
    found = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", "?")
    return str(getattr(found, "value", found))


def _as_linear(layer: Conv1D) -> nn.Linear:
    inputs, outputs = layer.weight.shape
    made = nn.Linear(inputs, outputs, device="meta")
    made.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)
    made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return made


def _is_product(layer: nn.Linear) -> bool:
    found, expected = _outputs(layer)
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    )


def _looks_like_product(layer: nn.Linear) -> bool:
    """Return whether a layer maps inputs to one tensor of outputs; routers do not."""
    found, expected = _outputs(layer)
    return isinstance(found, Tensor) and found.shape == expected.shape


@torch.inference_mode()
def _outputs(layer: nn.Linear) -> tuple[object, Tensor]:
    """Return what a copy of a layer in float32 gives for random inputs, and the product."""
    wide = copy.deepcopy(layer).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((ROWS, layer.in_features), generator=generator).to(layer.weight.device)
    expected = nn.functional.linear(x, wide.weight, wide.bias)
    try:
        return wide(x), expected
    except Exception:  # noqa: BLE001 - it takes something else, and so is no product
        return None, expected
