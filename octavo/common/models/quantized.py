"""Reads how a checkpoint's weights are quantized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.common.models.errors import UnsupportedModelError
from octavo.common.models.json_files import CONFIG, read_json

METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
}
"""Supported methods, by their names in configs. The engine has a module for each, in
`octavo.engine.models.quantization.formats`."""
KEYS = ("quantization_config", "compression_config")
"""Config keys that describe the weights' quantization."""
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": None}
"""Files of older tools that describe the quantization, with the method unless the file names it."""


class Statement(NamedTuple):
    """A checkpoint's description of its quantization.

    Attributes:
        where: The key or file that describes it.
        method: Name of the method, in lower case.
        settings: Settings of the method in the config.
    """

    where: str
    method: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the method in its usual spelling."""
        return METHODS.get(self.method, self.method)


def find_statement(directory: Path) -> Statement | None:
    """Return a model directory's quantization; None if it is not quantized.

    Raises:
        UnsupportedModelError: The directory states two methods.
        ModelError: A file is invalid.
        OSError: A file cannot be opened.
    """
    statements = list(_statements(directory, read_json(directory / CONFIG)))
    if not statements:
        return None
    first = statements[0]
    for other in statements[1:]:
        if other.method != first.method:
            raise UnsupportedModelError(
                f"{directory} contradicts itself: {first.where} says that its weights are"
                f" quantized with {first.name}, and {other.where} with {other.name}: remove the"
                " wrong one, or download the model again"
            )
    return first


def _statements(directory: Path, config: Mapping[str, Any]) -> list[Statement]:
    """Return all descriptions, the config's first."""
    statements = []
    within = {f"{key}.": part for key, part in config.items() if isinstance(part, dict)}
    parts: dict[str, Mapping[str, Any]] = {"": config, **within}
    for prefix, part in parts.items():
        statements += [
            _statement(f"{prefix}{key} in {CONFIG}", part[key], None)
            for key in KEYS
            if isinstance(part.get(key), dict)
        ]
    for name, method in FILES.items():
        if (directory / name).is_file():
            settings = read_json(directory / name)
            inner = settings.get("quantization")
            inner_settings = inner if isinstance(inner, dict) else settings
            statements.append(_statement(name, inner_settings, method))
    return statements


def _statement(where: str, settings: Mapping[str, Any], method: str | None) -> Statement:
    algorithm = settings.get("quant_algo")  # ModelOpt's; its FP8 is another format
    stated_method = (
        settings.get("quant_method") or (algorithm and f"modelopt {algorithm}") or method
    )
    return Statement(where, str(stated_method or "an unnamed method").lower(), settings)
