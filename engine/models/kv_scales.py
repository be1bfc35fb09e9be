"""Measures the scales of an fp8 KV cache, which divide keys and values to fit its range."""

import torch
from transformers import PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.quantization.calibration import calibration_tokens, run_alone

MARGIN = 2.0
"""Factor by which keys and values may exceed those of the calibration text before they are clamped.
It costs a floating-point type no precision."""


@torch.inference_mode()
def measure_kv_scales(
    model: PreTrainedModel, shape: ModelShape, path: str, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Return each layer's (key scale, value scale), from a run on the calibration text.

    Args:
        model: The model as loaded.
        shape: Its dimensions.
        path: The model's directory.
        dtype: Dtype of the cache.
    """
    largest = torch.finfo(dtype).max
    layers = run_alone(model, shape, calibration_tokens(path, shape))
    return [(_scale(layer.keys, largest), _scale(layer.values, largest)) for layer in layers]


def _scale(x: torch.Tensor | None, largest: float) -> float:
    return 1.0 if x is None else MARGIN * float(x.abs().amax()) / largest or 1.0
