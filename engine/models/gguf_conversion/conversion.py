"""Converts a GGUF file to a model directory, which is cached because conversion is slow.

There are two forms. In one, all weights are floats. In the other, weights that CPU kernels support
stay in the file and are read from there; see `octavo.common.models.gguf.tensor_locations`.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import copy
from functools import cache, partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.gguf.reader import (
    PACKED,
    check,
    check_same,
    field_of,
    identity,
    parts_of,
    read,
    save_tokenizer,
    tokenizer_of,
)
from octavo.common.models.gguf.tensor_locations import (
    BLOCK_TYPES,
    BLOCKS,
    FLOAT_TYPES,
    METHOD,
    ORDER,
    WEIGHT,
    TensorLocations,
    relocate,
)
from octavo.common.models.gguf.tokenizer import GgufTokenizer
from octavo.common.models.safetensors_files import INDEX, WHOLE, TensorLocation
from octavo.engine.models.empty_model import make_on_meta
from octavo.engine.models.gguf_conversion.config import FACTORS, complete_config, read_fields
from octavo.engine.models.gguf_conversion.tensors import MIN_DIMENSIONS, Weight, find_weights

HEAD = f"output{WEIGHT}"
UNREAD_FIELDS = {f"tokenizer.ggml.{name}" for name in ("merges", "scores", "token_type")}
"""Long fields that no config depends on."""
SHARD_BYTES = 2 << 30
SHARD_NAME = "model-{:05d}-of-{:05d}.safetensors"

_one_at_a_time = Lock()
"""Lock held while functions of `gguf` are replaced."""


def prepare(path: Path, *, packed: bool = False) -> Path:
    """Return the directory of a GGUF file's model; convert it first if it is not in the cache.

    Args:
        path: The file.
        packed: Whether weights stay in blocks if possible.

    Raises:
        ModelError: The file is not GGUF, damaged, not supported by transformers, or changed.
        OSError: The file cannot be opened.
    """
    check(path)
    name = identity(path)

    def make(target: Path, stage: model_cache.Stage) -> None:
        tokenizer = tokenizer_of(path, name)
        stage(f"Converting {path.name} to safetensors, once")
        convert(path, target, packed=packed, tokenizer=tokenizer)
        check_same(path, name)

    prepared = model_cache.prepare(f"{name}{PACKED}" if packed else name, make)
    relocate(prepared, parts_of(path))
    return prepared


def convert(
    source: Path, target: Path, *, packed: bool = False, tokenizer: Path | None = None
) -> None:
    """Write the model and tokenizer of a GGUF file to the directory `target`.

    Weights become bfloat16; files of float32 or float16 weights keep their type.

    Args:
        source: The file.
        target: The directory.
        packed: Whether matrices that CPU kernels support stay in the file.
        tokenizer: The directory of its tokenizer, if created before.

    Raises:
        ModelError: The file is damaged or not supported by transformers.
    """
    source, *_ = parts_of(source)
    reader = read(source)
    dtype = _dtype(reader)
    words = GgufTokenizer.read(reader)
    if tokenizer is None:
        save_tokenizer(source, words, target)
    else:
        shutil.copytree(tokenizer, target)
    architecture = field_of(reader, "general.architecture")
    with redirect_stderr(StringIO()), _sharing(source, reader):  # else bars hide the spinner
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
    """Return the locations of matrices in the files, by name, and the types of blocks, by layer.

    Args:
        reader: Reader of the file, or of all parts.
        weights: The model's weights.
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
    """Write all weights outside `places` as floats, in files of at most `SHARD_BYTES`.

    Matrices become `dtype`; vectors stay in float32 beside blocks.
    """
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
        keeps = places and numbers.dim() < MIN_DIMENSIONS
        held[weight.name] = numbers if keeps else numbers.to(dtype)
        if sum(tensor.nbytes for tensor in held.values()) > SHARD_BYTES:
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
    """Make transformers reuse a file's reader and map of names.

    Each reader parses the vocabulary, and transformers would build the slow map for each module.
    """
    gguf: Any = import_module("gguf")
    with _one_at_a_time:
        originals = gguf.GGUFReader, gguf.get_tensor_name_map

        shared = copy(reader)
        shared.fields = {
            name: field for name, field in reader.fields.items() if name not in UNREAD_FIELDS
        }

        def read(path: str, *options: Any) -> Any:  # noqa: ANN401
            return shared if source.samefile(path) else originals[0](path, *options)

        gguf.GGUFReader, gguf.get_tensor_name_map = read, cache(originals[1])
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = originals


def _reads_itself(architecture: str) -> bool:
    """Return whether only transformers' loader can map the tensors of an architecture."""
    from transformers.modeling_gguf_pytorch_utils import (  # noqa: PLC0415
        GGUF_SUPPORTED_ARCHITECTURES,
    )

    return architecture.startswith("qwen35") and architecture not in GGUF_SUPPORTED_ARCHITECTURES


def _make_model(source: Path, reader: Any, architecture: str, dtype: Any) -> Any:  # noqa: ANN401
    """Return transformers' model for a file, without weights if this module finds them itself."""
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
        model: Any = make_on_meta(config, dtype)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"transformers cannot read {source}: {first_line(error)}") from error
    model.config.architectures = [type(model).__name__]
    return model


def _check_complete(source: Path, model: Any, weights: Iterable[Weight]) -> None:  # noqa: ANN401
    """Refuse a file that lacks weights, which would be random."""
    held = {weight.name for weight in weights}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(weight) for name, weight in parameters.items() if name in held}
    left = sorted(name for name, weight in parameters.items() if id(weight) not in tied)
    if left:
        raise ModelError(f"{source} lacks {len(left)} of the model's weights, as {left[0]}")


def _check_all_taken(source: Path, reader: Any, model: Any, weights: Iterable[Weight]) -> None:  # noqa: ANN401
    """Refuse a file with tensors that no weight uses.

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


def _dtype(reader: Any) -> Any:  # noqa: ANN401
    """Return the file's own float type, else bfloat16."""
    from gguf import GGMLQuantizationType as GgmlType  # noqa: PLC0415

    kinds = {tensor.tensor_type for tensor in reader.tensors}
    if kinds <= {GgmlType.F32}:
        return torch.float32
    return torch.float16 if kinds <= {GgmlType.F32, GgmlType.F16} else torch.bfloat16


def _set_end_tokens(model: Any, ends: list[int]) -> None:  # noqa: ANN401
    """Set the tokens that end an output; transformers reads only the EOS token."""
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
