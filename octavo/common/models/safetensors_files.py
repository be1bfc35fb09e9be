"""Checks a checkpoint's safetensors files by names, sizes and headers, without reading weights."""

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
    """A tensor's location in a file.

    Attributes:
        offset: Offset of the first byte.
        dtype: Type, in safetensors' spelling.
        shape: The shape.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensor_types(directory: Path) -> dict[str, str]:
    """Check all weight files; return the type of each tensor, by name.

    Raises:
        ModelError: A file is missing, truncated, damaged, a pickle or a Git LFS pointer, or files
            disagree on the location of a tensor; the message names them and says what to do.
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
    """Reject shards with tensors that their index lists elsewhere: copies may be stale.

    transformers reads all tensors of all shards, and uses the last one of each name.

    Args:
        index: The index.
        held: Tensors of each shard, by the shard's name.
    """
    where = read_index(index)
    for shard, tensors in held.items():
        for name in tensors:
            if where.setdefault(name, shard) != shard:
                raise ModelError(
                    f"{index.parent} has {name} both in {shard} and in {where[name]}, but "
                    f"{index.name} lists only the latter: they may differ. Download the model "
                    "again, or write it again with save_pretrained()"
                )
    for name, shard in where.items():
        if name not in held[shard]:
            raise ModelError(
                f"{index.parent / shard} lacks {name}, which {index.name} says it has: download"
                " both again"
            )


def no_weights(names: Iterable[str]) -> str:
    """Return why files of these names contain no loadable weights, with a remedy."""
    held = sorted(names)
    if pickled := [name for name in held if name.endswith(PICKLED)]:
        return (
            f"has no safetensors files; {pickled[0]} is a pickle, which can run code when loaded:"
            " convert it to safetensors with the model's save_pretrained()"
        )
    if ggufs := [name for name in held if name.endswith(".gguf")]:
        return (
            f"has no safetensors files: give the path of a GGUF file, such as {ggufs[0]}, or"
            " of the hub its type, such as OWNER/NAME:Q4_K_M"
        )
    if other := [name for name in held if name.endswith(".safetensors")]:
        return (
            f"has neither {WHOLE} nor {INDEX}; {other[0]} is in a layout that is not supported:"
            " use a version of the model in transformers' layout"
        )
    return f"has no weights: neither {WHOLE} nor {INDEX} is there; download the model again"


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers would load.

    Raises:
        ModelError: A file is missing, or there is both a single file and shards.
    """
    whole, index = directory / WHOLE, directory / INDEX
    if not index.is_file():
        return [whole] if whole.is_file() else []
    names = names_in_index(index)
    if whole.is_file():
        shards = [name for name in names if name != WHOLE and (directory / name).is_file()]
        if shards:  # else the index is left from an older download
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
    """Return the names of the files in an index.

    Raises:
        ModelError: See `read_index`.
    """
    return sorted(set(read_index(index).values()))


def read_index(index: Path) -> dict[str, str]:
    """Return each tensor's file name, by tensor name.

    Raises:
        ModelError: The file is not an index of safetensors files in its directory, or lists a
            tensor twice.
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
                f"{index} is not an index of safetensors files in its directory: it lists {file!r}"
            )
    if not files:
        raise ModelError(f"{index} is not an index of safetensors files: it lists none")
    return files


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, rejecting duplicate names.

    Raises:
        ValueError: A name occurs twice.
    """
    entries = dict(pairs)
    if len(entries) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{name!r} is there twice")
    return entries


def check_file(file: Path) -> dict[str, str]:
    """Return the types of a safetensors file's tensors, from its header.

    Raises:
        ModelError: The size of the file differs from its header's.
    """
    return {name: place.dtype for name, place in tensor_locations(file).items()}


def tensor_locations(file: Path) -> dict[str, TensorLocation]:
    """Return the locations of a safetensors file's tensors, from its header.

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
    """Return each tensor's type, shape, and data offsets after the header."""
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
