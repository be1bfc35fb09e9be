"""Whether a checkpoint has every weight that its model needs."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from octavo.common.models.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LENGTH_BYTES = 8
"""Of a safetensors header's length, with which the file begins."""
MOST_HEADER_BYTES = 100_000_000
"""What the format allows."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def check_files(path: str) -> None:
    """Refuse weights that are truncated, Git LFS pointers or pickled, before any is loaded.

    Args:
        path: a directory or a hub name; of the latter, only files that are here are checked.

    Raises:
        ModelError: the message names the file and says what to do.
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
            f"{path} has no safetensors files; {pickled[0]} is a pickle, which can run code when it"
            " is loaded: convert it to safetensors with the model's save_pretrained()"
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
        raise ModelError(f"{index} is no index of safetensors files: {error!r}") from error
    if gone := [file for file in files if not file.is_file()]:
        raise ModelError(f"{gone[0]} is missing, one of {len(files)} that {index.name} names")
    return files


def _check_size(file: Path) -> None:
    """Raise ModelError unless a file is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        beginning = opened.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            raise ModelError(
                f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its directory"
            )
        header = int.from_bytes(beginning[:LENGTH_BYTES], "little")
        if size >= LENGTH_BYTES and header > MOST_HEADER_BYTES:
            raise ModelError(f"{file} is no safetensors file")
        needed = LENGTH_BYTES + header
        if size >= needed > LENGTH_BYTES:
            opened.seek(LENGTH_BYTES)
            needed += _data_bytes(file, opened.read(header))
    if size < needed or header == 0:
        raise ModelError(
            f"{file} is truncated: it has {size} bytes of {needed} or more. Download or convert it"
            " again"
        )
    if size > needed:
        raise ModelError(f"{file} is damaged: it has {size} bytes, and its header says {needed}")


def _data_bytes(file: Path, header: bytes) -> int:
    """Return how many bytes of tensors a header describes."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} is no safetensors file: its header cannot be read") from error


def check_weights(path: str) -> None:
    """Refuses a model of which weights are missing or misshapen; see also `check_files`.

    transformers would draw these at random, and the model talk nonsense. It is asked for the
    model without memory for its weights, which are not read for that. Tied weights, of which
    one is enough, are its business, and what weights are called in checkpoints of all ages.

    Args:
        path: a directory or a hub name.

    Raises:
        ModelError: the message says what is wrong with how many weights, and names one.
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
    except Exception as error:  # noqa: BLE001 - loading it for good fails too, and says why
        if "`use_safetensors=True`" in str(error):  # its advice is not to set that
            raise ModelError(f"{path} has no safetensors files, and no others are loaded") from None
        return
    _, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{path} lacks {len(missing)} of the model's weights, as {missing[0]}")
    if misshapen := sorted(found["mismatched_keys"]):
        name, held, needed = misshapen[0]
        raise ModelError(
            f"{path} has {len(misshapen)} of the model's weights in another shape, as {name}:"
            f" {list(held)} in place of {list(needed)}"
        )
