"""Read the JSON files of a model's directory."""

import json
from pathlib import Path
from typing import Any

from octavo.common.models.errors import ModelError
from octavo.common.models.git_lfs import check_no_pointer

CONFIG = "config.json"


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object.

    Raises:
        ModelError: The file is a Git LFS pointer, or contains no JSON object.
        OSError: The file cannot be opened.
    """
    check_no_pointer(file)
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} has no JSON object: download it again")
    return content


def read_json_if_there(file: Path) -> dict[str, Any]:
    """Return a JSON file's object, empty if there is no such file; see `read_json`."""
    return read_json(file) if file.is_file() else {}
