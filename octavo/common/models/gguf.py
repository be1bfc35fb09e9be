"""Conversion of a GGUF file into a model directory, kept in the cache because it is slow.

There are two forms. In one, all weights are floats. In the other, those that CPU kernels take stay
in the file, which is read where they are; see `gguf_blocks.py`.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.gguf_blocks import (
    BLOCK_TYPES,
    BLOCKS,
    FLOAT_TYPES,
    METHOD,
    ORDER,
    WEIGHT,
    TensorLocations,
    relocate,
)
from octavo.common.models.gguf_config import FACTORS, complete_config, read_fields
from octavo.common.models.gguf_tensors import LEAST_DIMENSIONS, Weight, find_weights
from octavo.common.models.gguf_tokenizer import GgufTokenizer
from octavo.common.models.weight_files import INDEX, WHOLE, TensorLocation

MAGIC = b"GGUF"
HEAD = f"output{WEIGHT}"
PACKED, TOKENIZER = "-packed", "-tokenizer"
"""What follows the names of the form with blocks, and of the tokenizer alone, in the cache."""
REVISION = 5
"""Increased when the conversion changes, to invalidate older caches."""

_one_at_a_time = Lock()
"""Held while functions of `gguf` are replaced."""
SHARD_BYTES = 2 << 30
SHARD_NAME = "model-{:05d}-of-{:05d}.safetensors"
SAMPLES = 64
SAMPLE_BYTES = 1 << 16

TYPES = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
}
"""The types of tensors that are read."""
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
PART_NAME = "{}-{:05d}-of-{:05d}.gguf"
UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


def check(path: Path) -> None:
    """Check, without reading it, that a file is GGUF and that its other parts are there.

    Raises:
        ModelError: It is not, or one is absent.
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(
                f"{path} is no GGUF file; --model takes one, or a directory with a config.json"
            )
    parts_of(path)


def prepare(path: Path, *, packed: bool = False) -> Path:
    """Return the directory of a GGUF file's model; convert it first if it is not in the cache.

    Args:
        path: The file.
        packed: Whether weights stay in blocks where they can.

    Raises:
        ModelError: The file is not GGUF, damaged, not supported by transformers, or changed.
        OSError: The file cannot be opened.
    """
    check(path)
    name = identity(path)

    def make(target: Path, stage: model_cache.Stage) -> None:
        tokenizer = _prepare_tokenizer(path, name)
        stage(f"Converting {path.name} to safetensors, once")
        convert(path, target, packed=packed, tokenizer=tokenizer)
        _check_same(path, name)

    prepared = model_cache.prepare(f"{name}{PACKED}" if packed else name, make)
    relocate(prepared, parts_of(path))
    return prepared


def prepare_tokenizer(path: Path) -> Path:
    """Return a directory with a GGUF file's tokenizer; make one first if the cache has none.

    This takes no PyTorch, so a router makes it while its engine converts the model.

    Raises:
        ModelError: The file is not GGUF, is damaged, or its tokenizer is not known for certain.
        OSError: The file cannot be opened.
    """
    check(path)
    name = identity(path)
    models = (model_cache.cache_dir() / form for form in (name, f"{name}{PACKED}"))
    made = next((form for form in models if form.is_dir()), None)
    return made or _prepare_tokenizer(path, name)


def _prepare_tokenizer(path: Path, name: str) -> Path:
    """Return the directory of a file's tokenizer alone.

    Args:
        path: The file.
        name: Its identity.
    """

    def make(target: Path, stage: model_cache.Stage) -> None:
        stage(f"Reading the tokenizer of {path.name}")
        source, *_ = parts_of(path)
        _save_tokenizer(source, GgufTokenizer.read(_read(source)), target)
        _check_same(path, name)

    return model_cache.prepare(f"{name}{TOKENIZER}", make)


def _check_same(path: Path, name: str) -> None:
    """Refuse a file that has another identity than before."""
    if identity(path) != name:
        raise ModelError(f"{path} was written to while it was converted")


def parts_of(path: Path) -> list[Path]:
    """Return the files that a model is split into, as llama.cpp names them; one in most cases.

    Raises:
        ModelError: One of them is absent.
    """
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    names = [PART_NAME.format(named["stem"], number, count) for number in range(1, count + 1)]
    parts = [path.with_name(name) for name in names]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} is one of {count} parts, of which {absent[0]} is not beside it")
    return parts


def identity(path: Path) -> str:
    """Return a model's name in the cache: its first file's stem and a digest.

    The digest covers sizes, modification times and 64 samples of the content (container images
    often give all files one time). A digest of the whole content would take seconds per GB at each
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


def convert(
    source: Path, target: Path, *, packed: bool = False, tokenizer: Path | None = None
) -> None:
    """Write the model and tokenizer of a GGUF file to the directory `target`.

    Weights become bfloat16; files of float32 or float16 weights keep their type.

    Args:
        source: The file.
        target: The directory.
        packed: Whether matrices that CPU kernels take are left in the file; see `gguf_blocks.py`.
        tokenizer: The directory of its tokenizer, if it was made before.

    Raises:
        ModelError: The file is damaged or not supported by transformers.
    """
    import torch  # noqa: PLC0415 - seconds to import, once in a model's life

    source, *_ = parts_of(source)
    reader = _read(source)
    dtype = _dtype(reader)
    words = GgufTokenizer.read(reader)
    if tokenizer is None:
        _save_tokenizer(source, words, target)
    else:
        shutil.copytree(tokenizer, target)
    architecture = _field(reader, "general.architecture")
    with redirect_stderr(StringIO()), _sharing(source, reader):  # progress bars over the spinner
        model = _make_model(source, reader, architecture, dtype)
        if _reads_itself(architecture):
            weights = [
                Weight(name, (), False, None, partial(torch.clone, weight))
                for name, weight in model.state_dict().items()
            ]
        else:
            weights = find_weights(reader.tensors, architecture, model.config.to_dict(), model)
            _check_complete(source, model, weights)
            _check_all_taken(source, reader, model, weights)
    _set_end_tokens(model, words.ends)
    places, kinds = _places(reader, weights) if packed else ({}, {})
    if kinds:
        model.config.quantization_config = {"quant_method": METHOD, "weights": kinds}
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    if places:
        files = tuple((str(part), part.stat().st_size) for part in reader.parts)
        TensorLocations(files, places).write(target)
    _write_floats(target, weights, places, dtype)


def _places(
    reader: Any,  # noqa: ANN401
    weights: Sequence[Weight],
) -> tuple[dict[str, tuple[int, TensorLocation]], dict[str, str]]:
    """Return where matrices are in the files, by name, and the types of those in blocks, by layer.

    Args:
        reader: Of the file, or of all parts.
        weights: The model's.
    """
    places: dict[str, tuple[int, TensorLocation]] = {}
    kinds: dict[str, str] = {}
    sizes = [part.stat().st_size for part in reader.parts]
    for weight in weights:
        if not weight.is_rows:
            continue
        (tensor,) = weight.tensors
        kind, rows = tensor.tensor_type.name, int(tensor.shape[1])
        layer, offset = weight.name.removesuffix(WEIGHT), int(tensor.data_offset)
        file = reader.part_of[tensor.name]
        within = offset + int(tensor.n_bytes) <= sizes[file] and weight.name.endswith(WEIGHT)
        if within and kind in BLOCK_TYPES:
            kinds[layer] = kind
            width = int(tensor.n_bytes) // rows
            places[layer + BLOCKS] = file, TensorLocation(offset, "U8", (rows, width))
        elif within and kind in FLOAT_TYPES and weight.order is None:
            columns = int(tensor.shape[0])
            places[weight.name] = file, TensorLocation(offset, kind, (rows, columns))
    return places, kinds


def _write_floats(
    target: Path,
    weights: Iterable[Weight],
    places: Collection[str],
    dtype: Any,  # noqa: ANN401
) -> None:
    """Write all weights that are not in places as floats, in files of at most `SHARD_BYTES`.

    Matrices become `dtype`; vectors stay in float32 beside blocks.
    """
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    shards: list[list[str]] = []
    held: dict[str, Any] = {}

    def write() -> None:
        save_file(held, target / f"{len(shards)}{WHOLE}", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for weight in weights:
        layer = weight.name.removesuffix(WEIGHT)
        if layer + BLOCKS in places:
            if weight.order is not None:
                held[layer + ORDER] = torch.from_numpy(weight.order)
            continue
        if weight.name in places:
            continue
        numbers = weight.numbers()
        keeps = places and numbers.dim() < LEAST_DIMENSIONS
        held[weight.name] = numbers if keeps else numbers.to(dtype)
        if sum(own.nbytes for own in held.values()) > SHARD_BYTES:
            write()
    if held or not shards:
        write()
    if len(shards) == 1:
        (target / f"0{WHOLE}").rename(target / WHOLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        name = SHARD_NAME.format(number + 1, len(shards))
        (target / f"{number}{WHOLE}").rename(target / name)
        where |= dict.fromkeys(names, name)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}) + "\n")


@contextmanager
def _sharing(source: Path, reader: Any) -> Iterator[None]:  # noqa: ANN401
    """Have transformers use a file's reader, as each parses the vocabulary, and one map of names.

    It makes the map, which takes long, for each module of a model.
    """
    gguf: Any = import_module("gguf")
    with _one_at_a_time:
        given = gguf.GGUFReader, gguf.get_tensor_name_map

        def read(path: str, *options: Any) -> Any:  # noqa: ANN401
            return reader if source.samefile(path) else given[0](path, *options)

        gguf.GGUFReader, gguf.get_tensor_name_map = read, cache(given[1])
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = given


def _save_tokenizer(source: Path, tokenizer: GgufTokenizer, target: Path) -> None:
    """Write a file's tokenizer to the directory `target`.

    Raises:
        ModelError: The file's fields make none, or none that is known for certain.
    """
    try:
        tokenizer.save(target)
    except ModelError as error:
        raise type(error)(f"{source} cannot be served: {error}") from error.__cause__


def _reads_itself(architecture: str) -> bool:
    """Return whether only transformers' loader can map the tensors of an architecture."""
    from transformers.modeling_gguf_pytorch_utils import (  # noqa: PLC0415
        GGUF_SUPPORTED_ARCHITECTURES,
    )

    return architecture.startswith("qwen35") and architecture not in GGUF_SUPPORTED_ARCHITECTURES


def _make_model(source: Path, reader: Any, architecture: str, dtype: Any) -> Any:  # noqa: ANN401
    """Return the model of transformers' class for a file, without weights if they can be found."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig  # noqa: PLC0415

    place: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        complete_config(config, architecture, read_fields(reader, architecture))
        if _reads_itself(architecture):
            whole = GgufConfig(dequantize=True)
            return AutoModelForCausalLM.from_pretrained(
                **place, config=config, dtype=dtype, quantization_config=whole
            )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"transformers cannot read {source}: {first_line(error)}") from error
    model.config.architectures = [type(model).__name__]
    return model


def _check_complete(source: Path, model: Any, weights: Iterable[Weight]) -> None:  # noqa: ANN401
    """Refuse a file that lacks weights, which would be random."""
    held = {weight.name for weight in weights}
    own = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(weight) for name, weight in own.items() if name in held}
    left = sorted(name for name, weight in own.items() if id(weight) not in tied)
    if left:
        raise ModelError(f"{source} lacks {len(left)} of the model's weights, as {left[0]}")


def _check_all_taken(source: Path, reader: Any, model: Any, weights: Iterable[Weight]) -> None:  # noqa: ANN401
    """Refuse a file with numbers that no weight takes.

    Raises:
        UnsupportedModelError: There are some, such as biases that the model's class does not have.
    """
    taken = {tensor.name for weight in weights for tensor in weight.tensors}
    left = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if tensor.name not in taken and tensor.name.removesuffix(WEIGHT) not in FACTORS
    }
    if model.config.tie_word_embeddings:  # some files have the head, too
        left.pop(HEAD, None)
    if left:
        raise UnsupportedModelError(
            f"{source} cannot be served: {sum(left.values()):,} of its numbers are weights, such as"
            f" {next(iter(left))}, that {type(model).__name__} of transformers does not have"
        )


def _read(path: Path) -> Any:  # noqa: ANN401 - gguf has no types
    """Read a file's fields and tensor positions; check that it is a complete language model.

    Its `parts` are the files, and `part_of` the number of the one that has a tensor, by name.
    """
    import gguf  # noqa: PLC0415 - rarely needed

    parts = parts_of(path)
    readers = [_read_part(part) for part in parts]
    reader, *others = readers
    count = _field(reader, "split.count") or 1
    if count != len(parts):
        raise ModelError(
            f"{path} is one of {count} parts: give the first one, under the name that llama.cpp"
            " gives it, with the others beside it"
        )
    reader.parts = parts
    reader.part_of = {
        tensor.name: number for number, own in enumerate(readers) for tensor in own.tensors
    }
    for other in others:
        reader.tensors.extend(other.tensors)
    if _field(reader, gguf.Keys.Tokenizer.MODEL) is None:
        raise ModelError(f"{path} holds no tokenizer, so it is no language model of its own")
    return reader


def _read_part(path: Path) -> Any:  # noqa: ANN401
    """Read a file's fields and tensor positions."""
    try:
        reader = _reader_class()(path)
    except Exception as error:
        if (unknown := UNKNOWN_TYPE.search(str(error))) is not None:
            raise ModelError(
                f"{path} has tensors of type {unknown[1]}, which is none that Octavo knows: use a"
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
    """Return gguf's reader, which reads a vocabulary's bytes as plain arrays: it is twice as fast.

    Slices of a `memmap` are slow to make, and it makes several for each token.
    """
    import gguf  # noqa: PLC0415 - rarely needed
    import numpy as np  # noqa: PLC0415

    def bytes_of(reader: Any) -> Any:  # noqa: ANN401
        return vars(reader)["data"]

    def set_bytes(reader: Any, mapped: Any) -> None:  # noqa: ANN401
        vars(reader)["data"] = np.asarray(mapped)

    return type("Reader", (gguf.GGUFReader,), {"data": property(bytes_of, set_bytes)})


def _dtype(reader: Any) -> Any:  # noqa: ANN401
    """Return the file's own float type, else bfloat16."""
    import torch  # noqa: PLC0415 - seconds to import, once in a model's life
    from gguf import GGMLQuantizationType as Kind  # noqa: PLC0415

    kinds = {tensor.tensor_type for tensor in reader.tensors}
    if kinds <= {Kind.F32}:
        return torch.float32
    return torch.float16 if kinds <= {Kind.F32, Kind.F16} else torch.bfloat16


def _set_end_tokens(model: Any, ends: list[int]) -> None:  # noqa: ANN401
    """Set the tokens that end an output; transformers reads only the EOS token."""
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)


def _field(reader: Any, key: str) -> Any:  # noqa: ANN401
    """Return a field's value, or None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
