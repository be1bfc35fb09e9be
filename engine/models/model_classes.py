"""The transformers classes of models that Octavo serves."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from octavo.common.models.image_families import IMAGE_FAMILIES


def auto_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - transformers has no type for it
    """Return the automatic class that makes a config's model."""
    reads_images = config.model_type in IMAGE_FAMILIES
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def writes_text(config: PreTrainedConfig) -> bool:
    """Return whether transformers lists a config's model among those of text."""
    return config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def without_vision(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the text model alone, for models whose images Octavo does not serve.

    If transformers has no class for the text model, this returns the config unchanged.
    """
    kind = config.model_type
    if kind in IMAGE_FAMILIES:
        return config
    whole = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    alone = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    return config if whole is None or alone in {None, whole} else config.get_text_config()
