"""Formats of published quantized checkpoints, one per file.

To add a format, add a module here with a `Format` (see base.py) named `FORMAT`, a line in
`FORMATS`, and its name in `octavo.common.models.quantized.METHODS`.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.common.models.errors import UnsupportedModelError
from octavo.common.models.quantized import Statement, find_statement

if TYPE_CHECKING:
    from octavo.engine.models.quantization.formats.base import Format

FORMATS = {
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8_blocks",
    "mxfp4": "mxfp4",
    "gguf": "gguf",
}
"""Each format's module by its name in configs."""


def find_format(directory: Path) -> "Format | None":
    """Return the format of a model's directory; None if its weights are not quantized.

    It is None for methods outside `FORMATS` too: `check_checkpoint` has refused those before.

    Raises:
        UnsupportedModelError: Octavo does not read the format with these settings.
        ModelError: A file cannot be read.
        OSError: A file cannot be read.
    """
    statement = find_statement(directory)
    if statement is None or statement.method not in FORMATS:
        return None
    try:
        return make_format(statement)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{directory} is quantized with {statement.name} ({statement.where}): {error}"
        ) from None


def make_format(statement: Statement) -> "Format":
    """Return the format that a statement describes.

    Raises:
        UnsupportedModelError: The message names the unsupported setting.
    """
    kind: type[Format] = import_module(f"{__name__}.{FORMATS[statement.method]}").FORMAT
    return kind(statement.settings)
