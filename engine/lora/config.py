"""Reads `adapter_config.json`, as peft writes it for LoRA (Hu et al. 2021).

A setting that changes outputs but is not supported here is refused by name. Settings that matter
only in training are ignored.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.common.models.checkpoint import ADAPTER_CONFIG
from octavo.common.models.errors import ModelError
from octavo.common.models.json_files import read_json
from octavo.engine.lora.errors import AdapterError

MAX_RANK = 256
"""Maximum rank of an adapter's matrices."""
MAX_PATTERNS, MAX_PATTERN, MAX_REPEATS = 1024, 256, 3
"""Maximum patterns of a setting, and characters and repetitions of a pattern: a regular expression
with exponential time would block the engine."""
REPEATS = re.compile(r"[*+{]")
SLOW = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
"""Pattern of repeated groups, references to groups, and groups with options."""
MAX_BYTES, MAX_ALPHA = 1 << 20, 1_000_000
"""Maximum bytes of a config, and maximum alpha."""
IGNORED = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "lora_dropout", "fan_in_fan_out", "megatron_core", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
    }
)
"""Settings that do not affect outputs: tensor names show which layers are adapted."""
APPLIED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("init_lora_weights", "bias"),
    }
)
REASONS = {
    "use_dora": "DoRA scales the columns of the adapted weights",
    "modules_to_save": "it replaces whole modules of the base model",
    "lora_bias": "it adds biases to the adapted layers",
    "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it adapts parameters that are no linear layers",
    "layer_replication": "it repeats layers of the base model",
    "alora_invocation_tokens": "an activated LoRA applies to the tokens after its invocation alone",
}
"""Reasons for refusing settings that users are likely to have."""
UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base model's weights."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter's config that change its outputs.

    Attributes:
        rank: Rank of layers that `ranks` does not name.
        alpha: Alpha of layers that `alphas` does not name; products are scaled by alpha / rank.
        rslora: Whether the scale is alpha / sqrt(rank) instead (Kalajdzievski 2023).
        ranks: Ranks by regular expressions of layers' names; the first match applies.
        alphas: Alphas by regular expressions of layers' names; the first match applies.
        base: The model that it was trained for; empty if unknown.
    """

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Sequence[tuple[re.Pattern[str], int]] = ()
    alphas: Sequence[tuple[re.Pattern[str], float]] = ()
    base: str = ""

    def rank_of(self, layer: str) -> int:
        """Return the rank of the layer of a name."""
        return next((rank for pattern, rank in self.ranks if pattern.match(layer)), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of the product of a layer's matrices."""
        rank = self.rank_of(layer)
        alpha = next(
            (pattern_alpha for pattern, pattern_alpha in self.alphas if pattern.match(layer)),
            self.alpha,
        )
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(directory: Path) -> AdapterConfig:
    """Read the config of an adapter's directory.

    Raises:
        AdapterError: It is absent or malformed, or has a setting that Octavo does not apply.
    """
    file = directory / ADAPTER_CONFIG
    try:
        if file.is_file() and file.stat().st_size > MAX_BYTES:
            raise AdapterError(f"{file} has more than {MAX_BYTES} bytes")
        stated = read_json(_regular(file))
    except (ModelError, OSError, RecursionError) as error:
        raise AdapterError(f"{directory} is not an adapter in peft's format: {error}") from error
    if (kind := stated.get("peft_type")) != "LORA":
        raise AdapterError(f"{file}: peft_type is {kind!r}; Octavo serves LORA adapters alone")
    _refuse_unapplied(file, stated)
    return AdapterConfig(
        rank=_rank(file, "r", stated.get("r", 8)),
        alpha=_number(file, "lora_alpha", stated.get("lora_alpha", 8)),
        rslora=_switch(file, "use_rslora", stated.get("use_rslora")),
        ranks=_by_pattern(file, stated, "rank_pattern", _rank),
        alphas=_by_pattern(file, stated, "alpha_pattern", _number),
        base=str(stated.get("base_model_name_or_path") or ""),
    )


def _refuse_unapplied(file: Path, stated: Mapping[str, Any]) -> None:
    """Refuse settings that change outputs and that Octavo does not support."""
    if (bias := stated.get("bias", "none")) != "none":
        raise AdapterError(
            f"{file}: bias is {bias!r}, which Octavo does not apply; train with none"
        )
    if (init := stated.get("init_lora_weights", True)) not in UNCHANGED_BASE:
        raise AdapterError(
            f"{file}: init_lora_weights is {init!r}, which changes the base model's weights;"
            " convert the adapter by path_initial_model_for_weight_conversion of peft's"
            " save_pretrained"
        )
    for name, value in stated.items():
        if name in IGNORED or name in APPLIED or not value:
            continue
        why = f": {reason}" if (reason := REASONS.get(name)) else ""
        raise AdapterError(
            f"{file}: {name} is {str(value)[:80]!r}, which Octavo does not apply{why}"
        )


def _by_pattern(
    file: Path, stated: Mapping[str, Any], name: str, check: Callable[[Path, str, object], _Number]
) -> tuple[tuple[re.Pattern[str], _Number], ...]:
    """Return a setting's values by regular expressions of layers' names, or of their ends."""
    patterns = stated.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{file}: {name} must be an object of at most {MAX_PATTERNS} patterns")
    return tuple(
        (_compile(file, name, text), check(file, f"{name}[{text[:80]!r}]", value))
        for text, value in patterns.items()
    )


def _compile(file: Path, name: str, text: str) -> re.Pattern[str]:
    """Return peft's regular expression of a pattern: it also matches a name's end after a dot."""
    if len(text) > MAX_PATTERN or len(REPEATS.findall(text)) > MAX_REPEATS or SLOW.search(text):
        raise AdapterError(
            f"{file}: {name} has {text[:80]!r}, which may take too long to match: it may have at"
            f" most {MAX_PATTERN} characters and {MAX_REPEATS} repetitions, none of a group"
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except re.error as error:
        raise AdapterError(f"{file}: {name} has no regular expression {text[:80]!r}") from error


def _rank(file: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(
            f"{file}: {name} must be an integer from 1 to {MAX_RANK}; got {str(value)[:80]!r}"
        )
    return value


def _number(file: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise AdapterError(
            f"{file}: {name} must be a number of at most {MAX_ALPHA:,}; got {str(value)[:80]!r}"
        )
    return float(value)


def _switch(file: Path, name: str, value: object) -> bool:
    if not isinstance(value, bool | None):
        raise AdapterError(f"{file}: {name} must be true or false; got {str(value)[:80]!r}")
    return bool(value)


def _regular(file: Path) -> Path:
    """Return a file, or raise OSError if it is not regular: reading a pipe would never end."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no regular file")
    return file
