"""Reject checkpoints that Octavo cannot serve, before reading weights.

These checks read a few kilobytes: `config.json`, other JSON files and the headers of safetensors
files. `octavo.engine.models.checks` later rejects models that only transformers can detect.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.common.models.classification import classifies
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.gguf.tensor_locations import TensorLocations
from octavo.common.models.json_files import CONFIG, read_json
from octavo.common.models.modules import MODULES
from octavo.common.models.quantized import FILES, METHODS, find_statement
from octavo.common.models.safetensors_files import tensor_types

GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_INDEX = "model_index.json"

Config = dict[str, Any]

CONFIG_FILES = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, *FILES)
"""What `check_config` reads."""
OTHER_TASKS = {
    "ForMaskedLM": "fills in masked words",
    "ForPreTraining": "is trained to fill in masked words",
    "ForTokenClassification": "classifies tokens",
    "ForQuestionAnswering": "marks answers in a text",
    "ForMultipleChoice": "chooses among answers",
    "ForImageClassification": "classifies images",
    "RewardModel": "scores answers",
}
"""Tasks other than text generation, by the suffix of the model's class name."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Safetensors types of unquantized weights."""
PACKED_NAMES = ("weight", "packed", "blocks", "proj", "experts", "qzeros")
"""Suffixes of the names of weights, as opposed to tables and masks."""
USE_INSTEAD = (
    "use a version in bf16 or fp16, one that is quantized with"
    f" {', '.join(name for name in METHODS.values() if name != 'GGUF')}, or a GGUF file"
)


def check_checkpoint(directory: Path, *, embeds: bool = False) -> None:
    """Reject a model's directory that cannot be served.

    Args:
        directory: The directory.
        embeds: Whether the model embeds texts whatever its class.

    Raises:
        UnsupportedModelError: Octavo cannot serve such models; the message suggests an alternative.
        ModelError: A file is missing, incomplete or unreadable.
        OSError: A file cannot be opened.
    """
    check_config(directory, embeds=embeds)
    types = tensor_types(directory)
    TensorLocations.read(directory)
    if find_statement(directory) is None:
        _check_types(directory, types)


def check_config(directory: Path, *, embeds: bool = False) -> None:
    """Reject a model's directory by its JSON files; its weights may be missing.

    Args:
        directory: The directory.
        embeds: See `check_checkpoint`.

    Raises:
        UnsupportedModelError: Octavo cannot serve the model.
        ModelError: A file is missing or damaged.
        OSError: A file cannot be opened.
    """
    config = read_json(directory / CONFIG)
    if (directory / GENERATION_CONFIG).is_file():
        read_json(directory / GENERATION_CONFIG)  # transformers ignores an unreadable one
    for check in _CHECKS:
        check(directory, config)
    if not (embeds or (directory / MODULES).is_file() or classifies(directory)):
        _check_task(directory, config)


def why_no_model(directory: Path) -> str:
    """Return why a directory without config.json is not a model, with an alternative."""
    if (directory / ADAPTER_CONFIG).is_file():
        return _adapter(directory)
    if (directory / DIFFUSERS_INDEX).is_file():
        return "holds an image model of the diffusers library: Octavo serves language models"
    if held := next(directory.glob("*.gguf"), None):
        return f"holds no model: it has no {CONFIG}; for {held.name}, give the file's own path"
    if (directory / "params.json").is_file():
        return (
            f"holds no model in transformers' layout: it has params.json, but no {CONFIG}; use the"
            " version of the model that has one"
        )
    return f"holds no model: it has no {CONFIG}"


def _check_adapter(directory: Path, _: Config) -> None:
    if (directory / ADAPTER_CONFIG).is_file():
        raise UnsupportedModelError(f"{directory} {_adapter(directory)}")


def _adapter(directory: Path) -> str:
    base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    on = f" for {base}" if base else ""
    text = f"holds a LoRA adapter{on} ({ADAPTER_CONFIG}), and Octavo does not apply adapters"
    if (directory / CONFIG).is_file():
        return f"{text}: merge it into the model; if that is done, delete {ADAPTER_CONFIG}"
    return f"{text}: merge it into its base model, and give the result's directory"


def _check_quantization(directory: Path, _: Config) -> None:
    stated = find_statement(directory)
    if stated is None:
        return
    if held := _unquantized_type(directory):
        raise UnsupportedModelError(
            f"{directory} contradicts itself: {stated.where} says that its weights are quantized"
            f" with {stated.name}, but they are {held} without scales. If they are the original"
            " weights, remove that statement; else download the model again"
        )
    if stated.method not in METHODS:
        raise UnsupportedModelError(
            f"{directory} is quantized with {stated.name} ({stated.where}), which Octavo does not"
            f" serve: {USE_INSTEAD}"
        )


def _unquantized_type(directory: Path) -> str | None:
    """Return the type of unquantized weights; None if quantized or missing."""
    try:
        types = tensor_types(directory) | TensorLocations.read(directory).types()
    except ModelError:
        return None
    if _packed(types) or any(_is_scale(name) for name in types):
        return None
    return " and ".join(sorted(set(types.values()) & FLOATS)) or None


def _check_task(directory: Path, config: Config) -> None:
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{directory} is an encoder-decoder model ({config.get('model_type', 'unknown type')}),"
            " which Octavo does not serve: use a decoder-only language model"
        )
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    tasks = {name: _task(name) for name in names}
    if names and all(tasks.values()):
        raise UnsupportedModelError(
            f"{directory} is a {names[0]}, which {tasks[names[0]]} and generates no text: use a"
            " model whose architecture ends with ForCausalLM; or if it embeds texts, set --pooling"
        )


def _task(architecture: str) -> str | None:
    """Return the task of a model class that does not generate text; None for others."""
    return next((task for end, task in OTHER_TASKS.items() if architecture.endswith(end)), None)


_CHECKS: tuple[Callable[[Path, Config], None], ...] = (
    _check_adapter,
    _check_quantization,
)


def _check_types(directory: Path, types: dict[str, str]) -> None:
    """Reject quantized weights if the config states no quantization.

    transformers would use their values without scales, and the model would generate nonsense.
    """
    if packed := _packed(types):
        raise UnsupportedModelError(
            f"{directory} has {len(packed)} quantized weights, such as {packed[0]} of type"
            f" {types[packed[0]]}, which Octavo does not serve: {USE_INSTEAD}"
        )


def _packed(types: dict[str, str]) -> list[str]:
    """Return the names of quantized weights, and their types."""
    return sorted(name for name, kind in types.items() if is_packed(name, kind))


def is_packed(name: str, kind: str) -> bool:
    """Return whether a tensor is a weight of a quantized type."""
    if kind in FLOATS:
        return False
    return kind.startswith(("F", "E")) or name.rpartition(".")[2].endswith(PACKED_NAMES)


def _is_scale(name: str) -> bool:
    return "scale" in name.rpartition(".")[2]
