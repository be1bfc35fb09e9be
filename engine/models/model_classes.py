"""The transformers classes of models that Octavo serves."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto

from octavo.common.models.image_families import IMAGE_FAMILIES


def auto_class(config: PreTrainedConfig) -> Any:  # noqa: ANN401 - transformers has no type for it
    """Return the automatic class that makes a config's model."""
    in_text = config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reads_images = config.model_type in IMAGE_FAMILIES
    return AutoModelForCausalLM if in_text or not reads_images else AutoModelForImageTextToText
