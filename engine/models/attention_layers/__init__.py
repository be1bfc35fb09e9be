"""Replacements of attention modules that do not call transformers' `AttentionInterface`.

A replacement is a function of the module that calls `attend`. It runs with Octavo's attention
implementations; with any other, as in a reference run, transformers' own code runs.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.models.attention_layers.attend import OWN_CONFIG, is_paged

METHODS: dict[str, tuple[str, str, str]] = {
    "BloomAttention": ("forward", "bloom", "forward"),
    "CodeGenAttention": ("_attn", "attn_method", "gptj"),
    "FalconAttention": ("forward", "falcon", "forward"),
    "FalconModel": ("forward", "falcon", "model_forward"),
    "GPTJAttention": ("_attn", "attn_method", "gptj"),
    "GPTNeoSelfAttention": ("_attn", "attn_method", "gpt_neo"),
    "GPTNeoXJapaneseAttention": ("_attn", "attn_method", "gpt_neox_japanese"),
    "Llama4TextAttention": ("forward", "llama4", "forward"),
    "Llama4TextDecoderLayer": ("forward", "llama4", "layer_forward"),
    "Llama4TextMoe": ("forward", "llama4", "experts_forward"),
    "MptAttention": ("forward", "mpt", "forward"),
    "MptModel": ("forward", "mpt", "model_forward"),
}
"""Methods to replace, and files and names of their replacements, by the name of a module's class.

A file is imported when a model needs it, as it may import the model's code from transformers. A
replacement takes the module, the replaced method, and the method's arguments.
"""

SPLITTABLE = {"Llama4TextAttention", "Llama4TextDecoderLayer", "Llama4TextMoe"}
"""Classes whose replacements support tensor parallelism."""

REFERENCES = {"falcon": "sdpa"}
"""transformers' reference implementations by model type, if not "eager". Falcon's eager code adds
ALiBi twice (transformers 5.23)."""


def reference_attention(config: PreTrainedConfig) -> str:
    """Return the name of transformers' attention implementation that defines a model's results."""
    return REFERENCES.get(config.model_type, "eager")


def replace_attention(model: PreTrainedModel) -> None:
    """Replace the attention of a model's modules that are in `METHODS`.

    Args:
        model: The model; changed in place.
    """
    config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if replaced := METHODS.get(type(module).__name__):
            setattr(module, OWN_CONFIG, getattr(module, "config", config))
            name, file, function = replaced
            ours = getattr(import_module(f"{__name__}.{file}"), function)
            setattr(module, name, _either(module, ours, getattr(module, name)))


def _either(
    module: nn.Module, ours: Callable[..., Any], theirs: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as transformers'
        if is_paged(module):
            return ours(module, theirs, *arguments, **keywords)
        return theirs(*arguments, **keywords)

    return call
