"""Checks that a checkpoint has all weights of its model."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from octavo.common.models.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LENGTH_BYTES = 8
"""Bytes of the header's length, at the start of a safetensors file."""
MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def check_files(path: str) -> None:
    """Refuse weights that are truncated, Git LFS pointers or pickled, before any is loaded.

    Args:
        path: A directory, or a hub name, of which only files on this machine are checked.

    Raises:
        ModelError: The message names the file and says what to do.
    """
    directory = Path(path)
    if not directory.is_dir():
        config = try_to_load_from_cache(path, "config.json")
        if not isinstance(config, str):
            return
        directory = Path(config).parent
    files = _weight_files(directory)
    pickled = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLED)
    if not files and pickled:
        raise ModelError(
            f"{path} has no safetensors files; {pickled[0]} is a pickle, which can run code when"
            " loaded: convert it to safetensors with the model's save_pretrained()"
        )
    for file in files:
        _check_size(file)


def _weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers would load."""
    whole, index = directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = [directory / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of safetensors files: {error!r}") from error
    if gone := [file for file in files if not file.is_file()]:
        raise ModelError(f"{gone[0]} is missing, one of {len(files)} files in {index.name}")
    return files


def _check_size(file: Path) -> None:
    """Raise ModelError unless a file has the size that its header states."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        beginning = opened.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            raise ModelError(
                f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its directory"
            )
        header = int.from_bytes(beginning[:LENGTH_BYTES], "little")
        if size >= LENGTH_BYTES and header > MAX_HEADER_BYTES:
            raise ModelError(f"{file} is not a safetensors file")
        needed = LENGTH_BYTES + header
        if size >= needed > LENGTH_BYTES:
            opened.seek(LENGTH_BYTES)
            needed += _data_bytes(file, opened.read(header))
    if size < needed or header == 0:
        raise ModelError(
            f"{file} is truncated: it has {size} of {needed} or more bytes. Download or convert it"
            " again"
        )
    if size > needed:
        raise ModelError(f"{file} is damaged: it has {size} bytes, but its header states {needed}")


def _data_bytes(file: Path, header: bytes) -> int:
    """Return the size of the tensors that a header describes, in bytes."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is not a safetensors file: its header cannot be read") from error


def check_weights(path: str) -> None:
    """Refuse a model with missing or misshapen weights; see also `check_files`.

    transformers would initialize these at random, and the model would answer nonsense. This loads
    the model onto the meta device, which reads no weights. transformers takes care of tied weights
    and of old names.

    Args:
        path: A directory or a hub name.

    Raises:
        ModelError: The message says how many weights are wrong, and names one.
    """
    check_files(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            use_safetensors=True,
        )
    except Exception as error:  # noqa: BLE001 - loading it with weights fails too, and says why
        if "`use_safetensors=True`" in str(error):  # transformers advises to unset it
            raise ModelError(
                f"{path} has no safetensors files: convert its weights to safetensors"
            ) from None
        return
    _, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, such as {missing[0]}"
        )
    if misshapen := sorted(found["mismatched_keys"]):
        name, held, needed = misshapen[0]
        raise ModelError(
            f"{path} has {len(misshapen)} of the model's weights in another shape, such as {name}:"
            f" {list(held)} instead of {list(needed)}"
        )
