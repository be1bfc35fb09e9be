"""Reads GGUF files: parts, fields and tokenizers.

The engine converts models (`octavo.engine.models.gguf_conversion`), which needs PyTorch. A router
converts only tokenizers, which does not.
"""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, first_line
from octavo.common.models.gguf.tokenizer import GgufTokenizer

MAGIC = b"GGUF"
PACKED, TOKENIZER = "-packed", "-tokenizer"
"""Suffixes in the cache: of a model that keeps its blocks, and of a tokenizer alone."""
REVISION = 5
"""Version of the conversion; increase it to invalidate cached models."""
SAMPLES = 64
SAMPLE_BYTES = 1 << 16

TYPES = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
}
"""Supported types of tensors."""
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
PART_NAME = "{}-{:05d}-of-{:05d}.gguf"
LENGTH_BYTES = 8
"""Length of the size before each string, in bytes."""
ARRAY_HEAD = 12
"""Bytes of an array's type and length."""
UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


def check(path: Path) -> None:
    """Check, without reading all, that a file is GGUF and that its other parts exist.

    Raises:
        ModelError: The file is not GGUF, or a part is missing.
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(
                f"{path} is not a GGUF file; --model needs one, or a directory with a config.json"
            )
    parts_of(path)


def prepare_tokenizer(path: Path) -> Path:
    """Return a directory with a GGUF file's tokenizer; create it if it is not cached.

    This needs no PyTorch, so the router does it while the engine converts the model.

    Raises:
        ModelError: The file is not GGUF, is damaged, or has an unknown tokenizer.
        OSError: The file cannot be opened.
    """
    check(path)
    name = identity(path)
    models = (model_cache.cache_dir() / form for form in (name, f"{name}{PACKED}"))
    made = next((form for form in models if form.is_dir()), None)
    return made or tokenizer_of(path, name)


def tokenizer_of(path: Path, name: str) -> Path:
    """Return the cache directory of a file's tokenizer alone.

    Args:
        path: The file.
        name: Name from the file's identity.
    """

    def make(target: Path, stage: model_cache.Stage) -> None:
        stage(f"Reading the tokenizer of {path.name}")
        source, *_ = parts_of(path)
        save_tokenizer(source, GgufTokenizer.read(read(source)), target)
        check_same(path, name)

    return model_cache.prepare(f"{name}{TOKENIZER}", make)


def check_same(path: Path, name: str) -> None:
    """Reject a file whose identity has changed."""
    if identity(path) != name:
        raise ModelError(f"{path} was written to while it was converted")


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a model, by llama.cpp's names; usually a single file.

    Raises:
        ModelError: A part is missing.
    """
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    names = [PART_NAME.format(named["stem"], number, count) for number in range(1, count + 1)]
    parts = [path.with_name(name) for name in names]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ModelError(
            f"{path} is one of {count} parts, but {absent[0]} is not in the same directory"
        )
    return parts


def identity(path: Path) -> str:
    """Return a model's cache name: its first file's stem and a digest.

    The digest covers sizes, modification times and 64 samples of the content (as container images
    often give all files the same time). A digest of all content would cost seconds per GB at each
    start.
    """
    paths = parts_of(path)
    digest = hashlib.sha256(f"{REVISION}".encode())
    for part in paths:
        status = part.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        with part.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(status.st_size * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return f"{paths[0].stem}-{digest.hexdigest()[:16]}"


def save_tokenizer(source: Path, tokenizer: GgufTokenizer, target: Path) -> None:
    """Write a file's tokenizer to the directory `target`.

    Raises:
        ModelError: The fields describe no tokenizer, or an unknown one.
    """
    try:
        tokenizer.save(target)
    except ModelError as error:
        raise type(error)(f"{source} cannot be served: {error}") from error.__cause__


def read(path: Path) -> Any:  # noqa: ANN401 - gguf has no types
    """Read a file's fields and tensor positions; check that it is a complete language model.

    `parts` of the result are the files, and `part_of` maps tensor names to the file's number.
    """
    import gguf  # noqa: PLC0415 - rarely needed

    parts = parts_of(path)
    readers = [_read_part(part) for part in parts]
    reader, *others = readers
    count = field_of(reader, "split.count") or 1
    if count != len(parts):
        raise ModelError(
            f"{path} is one of {count} parts: pass the first one, with llama.cpp's name and the "
            "others in the same directory"
        )
    reader.parts = parts
    reader.part_of = {
        tensor.name: number
        for number, part_reader in enumerate(readers)
        for tensor in part_reader.tensors
    }
    for other in others:
        reader.tensors.extend(other.tensors)
    if field_of(reader, gguf.Keys.Tokenizer.MODEL) is None:
        raise ModelError(f"{path} has no tokenizer, so it is not a complete language model")
    return reader


def _read_part(path: Path) -> Any:  # noqa: ANN401
    """Read a file's fields and tensor positions."""
    try:
        reader = _reader_class()(path)
    except Exception as error:
        if (unknown := UNKNOWN_TYPE.search(str(error))) is not None:
            raise ModelError(
                f"{path} has tensors of type {unknown[1]}, which Octavo does not know: use a"
                f" file of {', '.join(sorted(TYPES))}"
            ) from error
        raise ModelError(
            f"{path} cannot be read; it is cut short or damaged ({first_line(error)})"
        ) from error
    for tensor in reader.tensors:
        if (kind := tensor.tensor_type.name) not in TYPES:
            raise ModelError(
                f"{path} has {tensor.name} of type {kind}, which Octavo does not read: use a file"
                f" of {', '.join(sorted(TYPES))}"
            )
    return reader


def _reader_class() -> Any:  # noqa: ANN401
    """Return gguf's reader with a faster way to read the vocabulary.

    gguf's own creates several slow `memmap` slices per token, which takes a second for 49,000
    tokens.
    """
    import gguf  # noqa: PLC0415 - rarely needed
    import numpy as np  # noqa: PLC0415

    kinds = gguf.GGUFValueType

    def bytes_of(reader: Any) -> Any:  # noqa: ANN401
        return vars(reader)["data"]

    def set_bytes(reader: Any, mapped: Any) -> None:  # noqa: ANN401
        vars(reader)["data"] = np.asarray(mapped)

    def get_field_parts(reader: Any, start: int, kind: int) -> Any:  # noqa: ANN401
        if kind != kinds.ARRAY or reader.byte_order != "I":
            return gguf.GGUFReader._get_field_parts(reader, start, kind)  # noqa: SLF001
        found, first = reader.data, start + ARRAY_HEAD
        head = [found[start : start + 4].view(np.uint32), found[start + 4 : first].view(np.uint64)]
        item, count = kinds(head[0][0]), int(head[1][0])
        if item is kinds.STRING:
            parts, end = _strings(found, first, count)
            return end - start, [*head, *parts], list(range(3, 3 + 2 * count, 2)), [kind, item]
        scalar = reader.gguf_scalar_to_np.get(item)
        if scalar is None:
            return gguf.GGUFReader._get_field_parts(reader, start, kind)  # noqa: SLF001
        end = first + count * np.dtype(scalar).itemsize
        values = found[first:end].view(scalar).reshape(count, 1)
        return end - start, [*head, *values], list(range(2, 2 + count)), [kind, item]

    members = {"data": property(bytes_of, set_bytes), "_get_field_parts": get_field_parts}
    return type("Reader", (gguf.GGUFReader,), members)


def _strings(found: Any, start: int, count: int) -> tuple[list[Any], int]:  # noqa: ANN401
    """Return the lengths and bytes of consecutive strings, and the end offset.

    Args:
        found: Bytes of the file, a NumPy array.
        start: Offset of the first string.
        count: Number of strings.

    Raises:
        ValueError: The file ends before the strings do.
    """
    parts: list[Any] = []
    numbers = memoryview(found)
    for _ in range(count):
        text = start + LENGTH_BYTES
        end = text + int.from_bytes(numbers[start:text], sys.byteorder)
        if end > len(found):
            raise ValueError("the file ends within a string")
        parts += found[start:text], found[text:end]
        start = end
    return parts, start


def field_of(reader: Any, key: str) -> Any:  # noqa: ANN401
    """Return a field's value; None if it is missing."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
