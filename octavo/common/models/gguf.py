"""Conversion of a GGUF file into a model directory, kept in the cache because it is slow."""

import hashlib
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, first_line

MAGIC = b"GGUF"
REVISION = 1
"""Increased when the conversion changes, to invalidate older caches."""

SAMPLES = 64
SAMPLE_BYTES = 1 << 16
SINGLE_DIGITS = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)
"""Names of pre-tokenizers that are GPT-2's with single digits."""


def prepare(path: Path) -> Path:
    """Return the directory of a GGUF file's model; convert it first if it is not in the cache.

    Raises:
        ModelError: The file is not GGUF, damaged, not supported by transformers, or changed.
        OSError: The file cannot be opened.
    """
    _check_magic(path)
    name = identity(path)

    def make(target: Path, stage: model_cache.Stage) -> None:
        stage(f"Converting {path.name} to safetensors, once")
        convert(path, target)
        if identity(path) != name:
            raise ModelError(f"{path} was written to while it was converted")

    return model_cache.prepare(name, make)


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


def convert(source: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file to the directory `target`.

    Weights become bfloat16; files of float32 or float16 weights keep their type.
    """
    reader = _read(source)
    with redirect_stderr(StringIO()):  # progress bars over the spinner
        model, tokenizer = _load(source, _dtype(reader))
        _set_end_tokens(model, reader)
        _set_pre_tokenizer(tokenizer, reader)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _load(source: Path, dtype: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Read the model and tokenizer; missing weights, which would be random, are an error."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    place: Any = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"transformers cannot read {source}: {first_line(error)}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(f"{source} lacks {len(missing)} of the model's weights, as {missing[0]}")
    return model, tokenizer


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
        raise ModelError(
            f"{path} cannot be read; it is cut short or damaged ({first_line(error)})"
        ) from error
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


def _set_end_tokens(model: Any, reader: Any) -> None:  # noqa: ANN401
    """Add the tokens that end a turn or a message; transformers reads only the EOS token."""
    from gguf import Keys  # noqa: PLC0415

    known = model.config.eos_token_id
    ends = set(known if isinstance(known, list) else [known])
    ends |= {_field(reader, key) for key in (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)}
    ends.discard(None)
    for config in (model.config, model.generation_config):
        config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)


def _set_pre_tokenizer(tokenizer: Any, reader: Any) -> None:  # noqa: ANN401
    """Set the pre-tokenizer, which transformers does not read from its name."""
    from gguf import Keys  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: PLC0415

    if _field(reader, Keys.Tokenizer.PRE) in SINGLE_DIGITS:
        # Otherwise spaces before a number are tokenized differently.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )


def _field(reader: Any, key: str) -> Any:  # noqa: ANN401
    """Return a field's value, or None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
