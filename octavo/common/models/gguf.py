"""Conversion of a GGUF file into a model directory, kept in the cache because it is slow.

There are two forms. In one, all weights are floats. In the other, those that CPU kernels take stay
in the file's own blocks; see `gguf_blocks.py`.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, UnsupportedModelError, first_line
from octavo.common.models.gguf_blocks import WEIGHT, keep_blocks, packed_types
from octavo.common.models.gguf_config import FACTORS, complete_config, read_fields
from octavo.common.models.gguf_tokenizer import GgufTokenizer
from octavo.common.without_torch import has_torch

MAGIC = b"GGUF"
HEAD = f"output{WEIGHT}"
PACKED = "-packed"
"""What follows the name of the form with blocks in the cache."""
REVISION = 4
"""Increased when the conversion changes, to invalidate older caches."""

_one_at_a_time = Lock()
"""Held while `gguf.GGUFReader` is replaced."""
SAMPLES = 64
SAMPLE_BYTES = 1 << 16

TYPES = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
}
"""The types of tensors that are read."""
UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


def prepare(path: Path, *, packed: bool | None = False) -> Path:
    """Return the directory of a GGUF file's model; convert it first if it is not in the cache.

    Args:
        path: The file.
        packed: Whether weights stay in blocks where they can; None for either, whichever is there.

    Raises:
        ModelError: The file is not GGUF, damaged, not supported by transformers, or changed.
        OSError: The file cannot be opened.
    """
    _check_magic(path)
    name = identity(path)
    forms = {False: name, True: f"{name}{PACKED}"}
    if packed is None:
        made = (form for form in forms if (model_cache.cache_dir() / forms[form]).is_dir())
        packed = next(made, False)
    keeps = packed

    def make(target: Path, stage: model_cache.Stage) -> None:
        stage(f"Converting {path.name} to safetensors, once")
        convert(path, target, packed=keeps)
        if identity(path) != name:
            raise ModelError(f"{path} was written to while it was converted")

    return model_cache.prepare(forms[keeps], make)


def identity(path: Path) -> str:
    """Return a file's name in the cache: its stem and a digest.

    The digest covers size, modification time and 64 samples of the content (container images often
    give all files one time). A digest of the whole content would take seconds per GB at each start.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{REVISION} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(status.st_size * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return f"{path.stem}-{digest.hexdigest()[:16]}"


def convert(source: Path, target: Path, *, packed: bool = False) -> None:
    """Write the model and tokenizer of a GGUF file to the directory `target`.

    Weights become bfloat16; files of float32 or float16 weights keep their type. A process without
    PyTorch has another one do it.

    Args:
        source: The file.
        target: The directory.
        packed: Whether the weights that CPU kernels take stay in blocks.

    Raises:
        ModelError: The file is damaged or not supported by transformers, or there is no PyTorch.
    """
    if not has_torch():
        _convert_elsewhere(source, target, packed=packed)
        return
    reader = _read(source)
    packed = packed and bool(packed_types(reader))
    dtype = _dtype(reader)
    tokenizer = _tokenizer(source, reader)
    with redirect_stderr(StringIO()), _sharing(source, reader):  # progress bars over the spinner
        # In float32, a weight can be told to be exactly one of the file's.
        model = _load(source, reader, _float32() if packed else dtype)
        _set_end_tokens(model, tokenizer.ends)
        model.save_pretrained(target, **({"max_shard_size": "1000TB"} if packed else {}))
    tokenizer.save(target, model.config.max_position_embeddings)
    del model
    if packed:
        keep_blocks(target, reader, dtype)


@contextmanager
def _sharing(source: Path, reader: Any) -> Iterator[None]:  # noqa: ANN401
    """Have transformers use a file's reader: each parses the vocabulary."""
    gguf: Any = import_module("gguf")
    with _one_at_a_time:
        given = gguf.GGUFReader

        def read(path: str, *options: Any) -> Any:  # noqa: ANN401
            return reader if source.samefile(path) else given(path, *options)

        gguf.GGUFReader = read
        try:
            yield
        finally:
            gguf.GGUFReader = given


def _convert_elsewhere(source: Path, target: Path, *, packed: bool) -> None:
    """Convert in a process of its own, which ends with this one."""
    arguments = [str(source), str(target), *(["packed"] if packed else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "octavo.common.leash", __name__, *arguments],
        start_new_session=True,
        stdin=subprocess.PIPE,  # open while this process lives; see leash.py
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        why = process.stdout.read().strip()
    if process.returncode:
        raise ModelError(
            why or f"{source} cannot be converted: the process ended with {process.returncode}"
        )


def main() -> None:
    """Convert the file to the directory of the arguments; print why if that fails."""
    source, target, *packed = sys.argv[1:]
    if not has_torch():
        print(f"{source}: to read a GGUF file takes PyTorch: pip install 'octavo[engine]'")
        sys.exit(1)
    try:
        convert(Path(source), Path(target), packed=bool(packed))
    except ModelError as error:
        print(error)
        sys.exit(1)


def _float32() -> Any:  # noqa: ANN401
    import torch  # noqa: PLC0415 - seconds to import, once in a model's life

    return torch.float32


def _tokenizer(source: Path, reader: Any) -> GgufTokenizer:  # noqa: ANN401
    """Read the tokenizer; build it once, so that what is refused is refused before the weights."""
    tokenizer = GgufTokenizer.read(reader)
    try:
        tokenizer.build()
    except ModelError as error:
        raise type(error)(f"{source} cannot be served: {error}") from error.__cause__
    return tokenizer


def _load(source: Path, reader: Any, dtype: Any) -> Any:  # noqa: ANN401
    """Read the model; missing weights, which would be random, are an error."""
    from gguf import Keys  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoConfig,
        AutoModelForCausalLM,
        GgufConfig,
    )

    place: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        architecture = _field(reader, Keys.General.ARCHITECTURE)
        complete_config(config, architecture, read_fields(reader, architecture))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place,
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source} cannot be served: {error}") from None
    except Exception as error:
        raise ModelError(f"transformers cannot read {source}: {first_line(error)}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"{source} lacks {len(missing)} of the model's weights, as {missing[0]}")
    _check_all_taken(source, reader, model)
    return model


def _check_all_taken(source: Path, reader: Any, model: Any) -> None:  # noqa: ANN401
    """Refuse a file with numbers that no weight takes: transformers leaves them out silently.

    Raises:
        UnsupportedModelError: There are some, such as biases that the model's class does not have.
    """
    weights = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    sizes = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if tensor.name.removesuffix(WEIGHT) not in FACTORS
    }
    if model.config.tie_word_embeddings:  # some files have the head, too
        sizes.pop(HEAD, None)
    if (left := sum(sizes.values()) - sum(weights.values())) > 0:
        raise UnsupportedModelError(
            f"{source} cannot be served: {left:,} of its numbers are weights, such as biases, that"
            f" {type(model).__name__} of transformers does not have"
        )


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(
                f"{path} is no GGUF file; --model takes one, or a directory with a config.json"
            )


def _read(path: Path) -> Any:  # noqa: ANN401 - gguf has no types
    """Read a file's fields and tensor positions; check that it is a complete language model."""
    import gguf  # noqa: PLC0415 - rarely needed

    _check_magic(path)
    try:
        reader = gguf.GGUFReader(path)
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
    parts = _field(reader, "split.count") or 1
    if parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts; join them with llama.cpp's `llama-gguf-split --merge`"
        )
    if _field(reader, gguf.Keys.Tokenizer.MODEL) is None:
        raise ModelError(f"{path} holds no tokenizer, so it is no language model of its own")
    return reader


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


if __name__ == "__main__":
    main()
