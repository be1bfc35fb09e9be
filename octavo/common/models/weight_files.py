"""Check a checkpoint's safetensors files by their names, sizes and headers; read no weights."""

import json
from collections.abc import Iterable
from pathlib import Path

from octavo.common.models.errors import ModelError
from octavo.common.models.git_lfs import check_no_pointer

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""Bytes of the header's length, at the start of a safetensors file."""
MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def tensor_types(directory: Path) -> dict[str, str]:
    """Return the type of each tensor by its name, after a check of all weight files.

    Raises:
        ModelError: A file is absent, truncated, damaged, a pickle or a Git LFS pointer; the
            message names it and says what to do.
    """
    files = weight_files(directory)
    if not files:
        names = [file.name for file in directory.iterdir()]
        raise ModelError(f"{directory} {no_weights(names)}")
    types: dict[str, str] = {}
    for file in files:
        types |= check_file(file)
    return types


def no_weights(names: Iterable[str]) -> str:
    """Return why files of these names are no weights that can be loaded, and what to do."""
    held = sorted(names)
    if pickled := [name for name in held if name.endswith(PICKLED)]:
        return (
            f"has no safetensors files; {pickled[0]} is a pickle, which can run code when loaded:"
            " convert it to safetensors with the model's save_pretrained()"
        )
    if ggufs := [name for name in held if name.endswith(".gguf")]:
        return f"has no safetensors files: give the path of a GGUF file, such as {ggufs[0]}"
    if other := [name for name in held if name.endswith(".safetensors")]:
        return (
            f"has neither {WHOLE} nor {INDEX}; {other[0]} is in a layout that is not supported:"
            " use a version of the model in transformers' layout"
        )
    return f"has no weights: neither {WHOLE} nor {INDEX} is there; download the model again"


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers would load."""
    whole, index = directory / WHOLE, directory / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    files = [directory / name for name in names_in_index(index)]
    if gone := [file for file in files if not file.is_file()]:
        raise ModelError(
            f"{gone[0]} is missing, one of {len(files)} files in {index.name}: download it"
        )
    return files


def names_in_index(index: Path) -> list[str]:
    """Return the names of the files that an index lists.

    Raises:
        ModelError: It is not an index of safetensors files.
    """
    check_no_pointer(index)
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error


def check_file(file: Path) -> dict[str, str]:
    """Return a safetensors file's tensors with their types, by its header.

    Raises:
        ModelError: Its size is not what its header states.
    """
    check_no_pointer(file)
    size, needed, entries = file.stat().st_size, LENGTH_BYTES, {}
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if size >= LENGTH_BYTES and header > MAX_HEADER_BYTES:
            raise ModelError(f"{file} is not a safetensors file")
        needed += header
        if size >= needed > LENGTH_BYTES:
            entries = _entries(file, opened.read(header))
            needed += max((end for _, end in entries.values()), default=0)
    if size < needed or header == 0:
        raise ModelError(
            f"{file} is truncated: it has {size} of {needed} or more bytes. Download or convert it"
            " again"
        )
    if size > needed:
        raise ModelError(f"{file} is damaged: it has {size} bytes, but its header states {needed}")
    return {name: dtype for name, (dtype, _) in entries.items()}


def _entries(file: Path, header: bytes) -> dict[str, tuple[str, int]]:
    """Return each tensor's type, and where its data ends after the header."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {
            name: (str(entry["dtype"]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header cannot be read") from error
