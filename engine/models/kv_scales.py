"""By what an fp8 KV cache divides keys and values, so that they fit its type."""

import torch
from transformers import PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.quantization.calibration import calibration_tokens, run_alone

MARGIN = 2.0
"""Keys and values may be so many times as large as on the calibration text; what is
larger still becomes the largest number there is. A floating-point type keeps its
precision over many such factors."""


@torch.inference_mode()
def measure_kv_scales(
    model: PreTrainedModel, shape: ModelShape, path: str, dtype: torch.dtype
) -> list[tuple[float, float]]:
    """Runs a model on the calibration text.

    Args:
        model: as loaded.
        shape: its figures.
        path: where its tokenizer is.
        dtype: of the cache.

    Returns:
        Each layer's (key scale, value scale).
    """
    largest = torch.finfo(dtype).max
    layers = run_alone(model, shape, calibration_tokens(path, shape))
    return [(_scale(keys, largest), _scale(values, largest)) for keys, values in layers]


def _scale(x: torch.Tensor, largest: float) -> float:
    return MARGIN * float(x.abs().amax()) / largest or 1.0
