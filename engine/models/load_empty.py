"""Creates a model without weights, for checks before reading them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import replace_attention
from octavo.engine.models.device import choose_device
from octavo.engine.models.dimensions import find_dimensions
from octavo.engine.models.dtypes import choose_cache_dtype, choose_dtype
from octavo.engine.models.empty_model import make_empty, running_empty
from octavo.engine.models.quantization import find_scheme
from octavo.engine.models.quantization.formats import find_format
from octavo.engine.models.quantization.formats.base import Format
from octavo.engine.models.read_weights import (
    read_config,
)
from octavo.engine.models.refusals import (
    as_model_error,
    as_unsupported,
    check_kernels,
    check_quantization,
)
from octavo.engine.models.vision import Vision, split_vision


@dataclass(frozen=True, slots=True)
class EmptyModel:
    """A model without its weights.

    Attributes:
        model: The model; see `empty_model.py`.
        shape: See `LoadedModel`.
        dtype: See `LoadedModel`.
        cache_dtype: See `LoadedModel`.
        device: The device that would run it.
        stored: The format of its checkpoint, if its weights are quantized.
        vision: The part that encodes images, if it has one.
    """

    model: PreTrainedModel
    shape: ModelShape
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    stored: Format | None = None
    vision: Vision | None = None


def load_empty(
    path: str,
    *,
    dtype: str,
    device: str,
    block_size: int,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
) -> EmptyModel:
    """Create a model from its config alone, and do all checks of `load` that need no weights.

    Args:
        path: A directory with a config.
        dtype: See `EngineSettings`.
        device: See `EngineSettings`.
        block_size: See `EngineSettings`.
        quantization: See `EngineSettings`.
        kv_cache_dtype: See `EngineSettings`.
        max_model_len: See `EngineSettings`.

    Raises:
        UnsupportedModelError: The engine cannot serve the model; the message says why.
        ModelError: Transformers cannot create it.
    """
    target = choose_device(device)
    with as_model_error(path):
        stored_format = find_format(Path(path))
        config = read_config(path, quantized=stored_format is not None)
        kind = choose_dtype(dtype, config.get_text_config(), target)
        model = make_empty(config, kind)
        vision = split_vision(model)
        replace_attention(model)
    cache_kind = choose_cache_dtype(kv_cache_dtype, kind, target)
    with as_unsupported(path), running_empty():
        shape = find_dimensions(model, max_model_len)
        check_kernels(shape, block_size, kind, cache_kind, target)
        if find_scheme(quantization) is not None:
            check_quantization(model, path, quantization, target, stored_format)
    return EmptyModel(model, shape, kind, cache_kind, target, stored_format, vision)
