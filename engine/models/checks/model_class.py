"""Refuses models without a text-generating class in transformers."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.common.models.errors import UnsupportedModelError
from octavo.common.models.image_families import IMAGE_FAMILIES
from octavo.common.models.json_files import CONFIG, read_json

_AUTO_CLASS = "AutoModelForCausalLM"

ENCODER = "is an encoder"
EMBEDS = ", or embed texts with it: set --pooling"
"""What else an encoder can do."""

_KINDS = (
    (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        | auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        "is a multimodal model",
    ),
    (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "is an encoder-decoder model"),
    (auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, "is a speech model"),
    (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, ENCODER),
    (auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES, ENCODER),
)
"""Transformers' tables of models that are not decoder-only language models, with their kinds."""


def check_model_class(path: str) -> None:
    """Refuse a model without a class in transformers, or with another class than it needs.

    Args:
        path: The model's directory.

    Raises:
        UnsupportedModelError: The message names the model's kind, and a kind that works.
    """
    config = read_json(Path(path) / CONFIG)
    kind = config.get("model_type")
    own_code = _own_code(config)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if own_code:
            raise UnsupportedModelError(f"{path} needs {_needs(own_code)}")
        if isinstance(kind, str):
            raise UnsupportedModelError(
                f"{path} has the model type {kind!r}, which transformers {version('transformers')}"
                " does not know: use another model, or a later release of transformers"
            )
        return  # transformers may recognize it by another field
    known = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if kind in IMAGE_FAMILIES:
        known = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    if known is None:
        what = next((what for table, what in _KINDS if kind in table), "is no language model")
        raise UnsupportedModelError(
            f"{path} {what} ({kind}), which Octavo does not serve: use a decoder-only language"
            f" model{EMBEDS if what == ENCODER else ''}"
        )
    if _is_encoder_decoder(path):
        raise UnsupportedModelError(
            f"{path} is an encoder-decoder model ({kind}), which Octavo does not serve: use a"
            " decoder-only language model"
        )
    if own_code and own_code.rpartition(".")[2].lower() != known.lower():
        raise UnsupportedModelError(
            f"{path} needs {_needs(own_code)} ({known}, the class for its type {kind!r}, may"
            " compute something else)"
        )


def _is_encoder_decoder(path: str) -> bool:
    """Return whether it is one, by its config's class if the file lacks the field."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - loading the model fails too, and says why
        return False
    return bool(config.is_encoder_decoder)


def _own_code(config: dict[str, Any]) -> str | None:
    """Return the class in the model's own code, as `module.Class`; None if it needs none."""
    classes = config.get("auto_map")
    if not isinstance(classes, dict) or not classes:
        return None
    kind = config.get("model_type")
    needed = classes.get(_AUTO_CLASS)
    if needed is None and kind not in CONFIG_MAPPING:
        needed = next(iter(classes.values()))
    return needed.rpartition("--")[2] if isinstance(needed, str) else None


def _needs(own_code: str) -> str:
    module, _, name = own_code.rpartition(".")
    return (
        f"code of its own ({name} in {module}.py), which Octavo does not run: use a version of the"
        " model that transformers has a class for"
    )
