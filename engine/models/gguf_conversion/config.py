"""Reads a GGUF file's attention settings that transformers would replace by its defaults.

transformers builds a config from a file's fields but ignores some: the scaling of rotary
frequencies, the width of heads and of their rotated part, and the scale of logits. llama.cpp's
src/llama-model.cpp and src/models/ define the fields.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.common.models.errors import UnsupportedModelError

Rope = dict[str, Any]
"""A config's `rope_parameters` for one type of layers."""

PARTIAL = ("nemotron", "phi3", "stablelm")
"""Architectures that may rotate a part of a head's dimensions."""
WHOLE = ("gemma2", "gemma3", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
"""Architectures that rotate all of them."""
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Number of layers of an architecture's 27B model, whose attention scale uses hidden width / heads;
other models use the head width."""
FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Names of tensors with divisors of rotary frequencies, `[dimensions / 2]`."""
EXPERT_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of Llama 3.1 and later. A file holds only the resulting factors."""


def read_fields(reader: Any, architecture: str) -> dict[str, Any]:  # noqa: ANN401 - gguf has no types
    """Return an architecture's fields and the factors of rotary frequencies, by short name.

    Args:
        reader: Reader of the file.
        architecture: Its name, the prefix of field names.
    """
    begin = f"{architecture}."
    fields = {
        name.removeprefix(begin): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(begin)
    }
    factors = {
        tensor.name.removesuffix(".weight"): np.array(tensor.data)
        for tensor in reader.tensors
        if tensor.name.removesuffix(".weight") in FACTORS
    }
    return fields | factors


def complete_config(config: Any, architecture: str, fields: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Set the settings that transformers did not read.

    Args:
        config: Transformers' config of the file; changed in place.
        architecture: The file's architecture.
        fields: The result of `read_fields`.

    Raises:
        UnsupportedModelError: The file has a setting that no config supports.
    """
    _set_heads(config, architecture, fields)
    for field, name in EXPERT_WIDTHS.items():
        if field in fields and hasattr(config, name):
            setattr(config, name, fields[field])
    if architecture == "phi3":
        config.sliding_window = fields.get("attention.sliding_window") or None
    for cap in CAPS:
        if cap in fields and hasattr(config, cap):
            setattr(config, cap, fields[cap])
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    if "full_attention" in parameters:
        # Only the layers that see the whole context are scaled.
        _set_rope(parameters["full_attention"], config, architecture, fields)
        if "rope.freq_base_swa" in fields and "sliding_attention" in parameters:
            parameters["sliding_attention"]["rope_theta"] = fields["rope.freq_base_swa"]
    else:
        _set_rope(parameters, config, architecture, fields)


def _set_heads(config: Any, architecture: str, fields: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Set the head dimension and the scale of attention."""
    if architecture in WHOLE and hasattr(config, "head_dim"):
        config.head_dim = fields.get("attention.key_length", config.head_dim)
    if architecture in SCALED_BY_WIDTH:
        by_width = config.num_hidden_layers == SCALED_BY_WIDTH[architecture]
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if by_width else config.head_dim


def _set_rope(rope: Rope, config: Any, architecture: str, fields: Mapping[str, Any]) -> None:  # noqa: ANN401
    if "rope.freq_base" in fields:
        rope["rope_theta"] = fields["rope.freq_base"]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = fields.get("rope.dimension_count", head)
    if architecture in PARTIAL:
        rope["partial_rotary_factor"] = rotated / head
    elif architecture in WHOLE and rotated != head:
        raise UnsupportedModelError(
            f"it rotates {rotated} of a head's {head} dimensions, which no {architecture} of"
            " transformers does"
        )
    if "rope_factors_long" in fields:
        _set_longrope(rope, config, fields)
    elif "rope_freqs" in fields:
        rope.update(_read_llama3(fields["rope_freqs"], rope["rope_theta"]))
    else:
        rope.update(_read_scaling(config, fields))


def _set_longrope(rope: Rope, config: Any, fields: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Set two lists of factors: for sequences up to the original context, and for longer ones."""
    original = fields.get("rope.scaling.original_context_length", config.max_position_embeddings)
    config.original_max_position_embeddings = original
    rope.update(
        rope_type="longrope",
        original_max_position_embeddings=original,
        long_factor=np.asarray(fields["rope_factors_long"]).tolist(),
        short_factor=np.asarray(fields["rope_factors_short"]).tolist(),
    )
    if "rope.scaling.attn_factor" in fields:
        rope["attention_factor"] = fields["rope.scaling.attn_factor"]


def _read_llama3(factors: Any, theta: float) -> Rope:  # noqa: ANN401
    """Return the `rope_parameters` from which llama.cpp computed these factors."""
    values = np.asarray(factors, np.float64)
    factor = float(values.max())
    if factor == values.min() == 1:
        return {}
    turns = LLAMA3["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(len(values)) / len(values))
    )
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), values, rtol=1e-4):
        raise UnsupportedModelError(
            "its factors of rotary frequencies (rope_freqs.weight) are not those of Llama 3.1"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _read_scaling(config: Any, fields: Mapping[str, Any]) -> Rope:  # noqa: ANN401
    """Return the parameters of frequencies that are scaled by one factor."""
    kind = fields.get("rope.scaling.type", "linear")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear")) or 1.0
    if kind == "none" or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"its rotary scaling is {kind!r}, which Octavo does not read: use a file with linear,"
            " yarn or longrope scaling"
        )
    original = fields.get("rope.scaling.original_context_length", config.max_position_embeddings)
    parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in fields:
            parameters[name] = fields[f"rope.scaling.yarn_{name}"]
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if fields.get(f"rope.scaling.{name}", 1.0) != 1:
            raise UnsupportedModelError(f"Octavo does not read its field rope.scaling.{name}")
    return parameters
