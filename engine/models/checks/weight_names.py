"""Checks that a checkpoint has all weights of its model, and that the model uses all of them."""

from collections.abc import Mapping
from typing import Any

import structlog
from transformers import PreTrainedModel

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.engine.models.read_weights import (
    load_weights,
    open_checkpoint,
    read_config,
)

log = structlog.get_logger(__name__)

CACHE_SCALES = ("k_scale", "v_scale")
"""Name suffixes of tensors that only a quantized KV cache needs."""


def check_weights(path: str) -> None:
    """Refuse a model with missing, misshapen or unused weights.

    transformers would initialize missing weights at random and ignore unused ones, and the model
    would produce nonsense. This loads the model onto the meta device, which reads no weights.
    transformers handles tied weights and old names.

    Args:
        path: The model's directory.

    Raises:
        ModelError: Weights are wrong; the message gives their number and one name.
    """
    checkpoint = open_checkpoint(path)
    try:
        model, loading_info = load_weights(
            path,
            read_config(path, quantized=checkpoint is not None),
            checkpoint,
            empty=True,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception:  # noqa: BLE001 - loading with weights fails too, and says why
        return
    check_loading(path, model, loading_info)


def check_loading(path: str, model: PreTrainedModel, loading_info: Mapping[str, Any]) -> None:
    """Refuse a model as `check_weights` does, once it is loaded.

    Args:
        path: The model's directory.
        model: The model.
        loading_info: What transformers says of its weights.

    Raises:
        ModelError: See `check_weights`.
    """
    if missing := sorted(loading_info["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}"
        )
    if misshapen := sorted(loading_info["mismatched_keys"]):
        name, held, needed = misshapen[0]
        raise ModelError(
            f"{path} has {len(misshapen)} of the model's weights in another shape, such as {name}:"
            f" {list(held)} instead of {list(needed)}"
        )
    _check_unused(path, sorted(loading_info["unexpected_keys"]), set(model.state_dict()))


def _check_unused(path: str, unused: list[str], used: set[str]) -> None:
    """Refuse unused tensors that would change a layer's results; warn about others.

    Others are common: weights of a vision tower, or of layers that predict further tokens.

    Raises:
        UnsupportedModelError: There are scales, biases or adapters that the model's code ignores.
    """
    unknown = [name for name in unused if f"{name.rpartition('.')[0]}.weight" in used]
    unknown = [name for name in unknown if not name.endswith(CACHE_SCALES)]
    if unknown:
        raise UnsupportedModelError(
            f"{path} has {len(unknown)} tensors that its model's code does not use, such as"
            f" {unknown[0]}: it would answer nonsense. Its weights are quantized, or need other"
            " code than transformers has; use a bf16 or fp16 version of the model, or a GGUF file"
            " of it"
        )
    if unused:
        log.warning("the model does not use some of its weights", count=len(unused), one=unused[0])
