"""Finds linear layers that only multiply by their weights.

Only these may be fused, packed or quantized. GPT-2's `Conv1D` is one, too, under another name.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.common.models.errors import ModelError

ROWS = 8
"""Number of random rows for comparing a layer with the product."""


def plain_linears(model: nn.Module) -> set[nn.Module]:
    """Return a model's linear layers that compute only the product with their weights.

    Subclasses of `nn.Linear` are judged by the results of each class's first layer.
    """
    is_plain: dict[type, bool] = {nn.Linear: True}
    layers: set[nn.Module] = set()
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        kind = type(layer)
        if kind not in is_plain:
            is_plain[kind] = kind.forward is nn.Linear.forward or _is_product(layer)
        if is_plain[kind]:
            layers.add(layer)
    return layers


def make_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a layer with this weight, `[outputs, inputs]`, and bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def replace_conv1d(model: PreTrainedModel) -> None:
    """Replace each `Conv1D`, whose weights are transposed, by an equivalent linear layer.

    Args:
        model: The model; changed in place.
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                weight = layer.weight.detach().t().contiguous()
                setattr(parent, name, make_linear(weight, layer.bias.detach()))


def check_quantizable(model: PreTrainedModel, path: str, quantization: str) -> None:
    """Refuse a model whose layers already quantize their weights or inputs.

    Args:
        model: The model as loaded.
        path: Its directory or hub name, for the message.
        quantization: The value of --quantization, not "none".

    Raises:
        ModelError: The message names the method, or the layers' class.
    """
    if settings := getattr(model.config, "quantization_config", None):
        raise already_quantized(path, _method(settings), quantization)
    plain = plain_linears(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer not in plain and _looks_like_product(layer):
            name = type(layer).__name__
            raise ModelError(
                f"{path} has {name} layers, which are not plain linear layers:"
                f" {_hint(quantization)}"
            )


def already_quantized(path: str, method: str, quantization: str) -> ModelError:
    """Return the error for `--quantization` with a quantized model."""
    return ModelError(f"{path} is already quantized ({method}): {_hint(quantization)}")


def _hint(quantization: str) -> str:
    return f"--quantization {quantization} is for models in bfloat16, float16 or float32"


def _method(settings: object) -> str:
    method = (
        settings.get("quant_method")
        if isinstance(settings, dict)
        else getattr(settings, "quant_method", "?")
    )
    return str(getattr(method, "value", method))


def _is_product(layer: nn.Linear) -> bool:
    computed, expected = _outputs(layer)
    return (
        isinstance(computed, Tensor)
        and computed.shape == expected.shape
        and torch.allclose(computed, expected, rtol=1e-4, atol=1e-4)
    )


def _looks_like_product(layer: nn.Linear) -> bool:
    """Return whether a layer maps inputs to one tensor of outputs; routers do not."""
    computed, expected = _outputs(layer)
    return isinstance(computed, Tensor) and computed.shape == expected.shape


@torch.inference_mode()
def _outputs(layer: nn.Linear) -> tuple[object, Tensor]:
    """Return the outputs of a layer's float32 copy for random inputs, and the product."""
    wide = copy.deepcopy(layer).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((ROWS, layer.in_features), generator=generator).to(layer.weight.device)
    expected = nn.functional.linear(x, wide.weight, wide.bias)
    try:
        return wide(x), expected
    except Exception:  # noqa: BLE001 - other arguments: not a product
        return None, expected
