"""Check a checkpoint's safetensors files by their names, sizes and headers; read no weights."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.common.models.errors import ModelError
from octavo.common.models.git_lfs import check_no_pointer

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""Bytes of the header's length, at the start of a safetensors file."""
MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor is in a file.

    Attributes:
        offset: The first byte.
        dtype: The type, by safetensors' name.
        shape: The shape.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensor_types(directory: Path) -> dict[str, str]:
    """Return the type of each tensor by its name, after a check of all weight files.

    Raises:
        ModelError: A file is absent, truncated, damaged, a pickle or a Git LFS pointer, or files
            disagree on which has a tensor; the message names them and says what to do.
    """
    files = weight_files(directory)
    if not files:
        names = [file.name for file in directory.iterdir()]
        raise ModelError(f"{directory} {no_weights(names)}")
    held = {file.name: check_file(file) for file in files}
    if files[0].name != WHOLE:
        _check_index(directory / INDEX, held)
    return {name: dtype for types in held.values() for name, dtype in types.items()}


def _check_index(index: Path, held: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse shards without the tensors that their index lists: other copies may be stale.

    transformers reads all tensors of all shards, and the last one of a name wins.

    Args:
        index: The index.
        held: The tensors of each shard, by the shard's name.
    """
    where = read_index(index)
    for shard, tensors in held.items():
        for name in tensors:
            if where.setdefault(name, shard) != shard:
                raise ModelError(
                    f"{index.parent} has {name} in {shard} as well as in {where[name]}, which"
                    f" {index.name} names: the two may differ. Download the model again, or write"
                    " it anew with save_pretrained()"
                )
    for name, shard in where.items():
        if name not in held[shard]:
            raise ModelError(
                f"{index.parent / shard} lacks {name}, which {index.name} says it has: download"
                " both again"
            )


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
    """Return the safetensors files that transformers would load.

    Raises:
        ModelError: One is absent, or there are both one whole file and several.
    """
    whole, index = directory / WHOLE, directory / INDEX
    if not index.is_file():
        return [whole] if whole.is_file() else []
    names = names_in_index(index)
    if whole.is_file():
        shards = [name for name in names if name != WHOLE and (directory / name).is_file()]
        if shards:  # else the index is what is left of an older download
            raise ModelError(
                f"{directory} has its weights twice, in {WHOLE} and in {len(shards)} files of"
                f" {INDEX}, such as {shards[0]}: remove {WHOLE}, or the others with their index"
            )
        return [whole]
    files = [directory / name for name in names]
    if gone := [file for file in files if not file.is_file()]:
        raise ModelError(
            f"{gone[0]} is missing, one of {len(files)} files in {index.name}: download it"
        )
    return files


def names_in_index(index: Path) -> list[str]:
    """Return the names of the files that an index lists.

    Raises:
        ModelError: See `read_index`.
    """
    return sorted(set(read_index(index).values()))


def read_index(index: Path) -> dict[str, str]:
    """Return the name of the file that has each tensor, by the tensor's name.

    Raises:
        ModelError: It is not an index of safetensors files in its own directory, or lists a tensor
            twice.
    """
    check_no_pointer(index)
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique)
        files = {str(name): str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
    for file in files.values():
        if not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelError(
                f"{index} is not an index of safetensors files beside it: it has {file!r}"
            )
    if not files:
        raise ModelError(f"{index} is not an index of safetensors files: it lists none")
    return files


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: A name is there twice.
    """
    entries = dict(pairs)
    if len(entries) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{name!r} is there twice")
    return entries


def check_file(file: Path) -> dict[str, str]:
    """Return a safetensors file's tensors with their types, by its header.

    Raises:
        ModelError: Its size is not what its header states.
    """
    return {name: place.dtype for name, place in tensor_locations(file).items()}


def tensor_locations(file: Path) -> dict[str, TensorLocation]:
    """Return where a safetensors file's tensors are, by its header.

    Raises:
        ModelError: See `check_file`.
    """
    check_no_pointer(file)
    size, needed = file.stat().st_size, LENGTH_BYTES
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if size >= LENGTH_BYTES and header > MAX_HEADER_BYTES:
            raise ModelError(f"{file} is not a safetensors file")
        needed += header
        if size >= needed > LENGTH_BYTES:
            entries = _entries(file, opened.read(header))
            needed += max((end for *_, end in entries.values()), default=0)
    if size < needed or header == 0:
        raise ModelError(
            f"{file} is truncated: it has {size} of {needed} or more bytes. Download or convert it"
            " again"
        )
    if size > needed:
        raise ModelError(f"{file} is damaged: it has {size} bytes, but its header states {needed}")
    data = LENGTH_BYTES + header
    return {
        name: TensorLocation(data + begin, dtype, shape)
        for name, (dtype, shape, begin, _) in entries.items()
    }


def _entries(file: Path, header: bytes) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return each tensor's type and shape, and where its data begins and ends after the header."""
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
        entries.pop("__metadata__", None)
        return {
            name: (
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(
            f"{file} is not a safetensors file: its header cannot be read ({error!r})"
        ) from error
