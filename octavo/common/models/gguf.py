"""Models in one GGUF file: checked, and converted once into what `from_pretrained` reads.

Unpacking the file's blocks takes longer than loading a model, so the result is
kept in the cache directory. The engine then loads it as it loads any directory.
"""

import hashlib
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from octavo.common.models import cache as model_cache
from octavo.common.models.errors import ModelError, first_line

MAGIC = b"GGUF"
REVISION = 1
"""Raised when what is converted changes, so that older caches are not taken for it."""

SAMPLES = 64
SAMPLE_BYTES = 1 << 16
SINGLE_DIGITS = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)
"""Pre-tokenizers that files only name, which are GPT-2's with each digit on its own."""


def prepare(path: Path) -> Path:
    """Returns the directory of a GGUF file's model, converting it first if need be.

    Raises:
        ModelError: it is no GGUF file, is damaged or of a kind that
            transformers cannot read, or was written to meanwhile.
        OSError: it cannot be opened.
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
    """Names what a file holds, for the cache: its stem and a digest.

    The digest is of size, time of modification and 64 pieces spread over the
    content. A file that is changed in place gets another time; one of the same
    size and time (images are often built with one time for all files) differs
    in the pieces; a file that is moved keeps its name. Reading all of it would
    cost seconds per GB at each start.
    """
    status = path.stat()
    digest = hashlib.sha256(f"{REVISION} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(status.st_size * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return f"{path.stem}-{digest.hexdigest()[:16]}"


def convert(source: Path, target: Path) -> None:
    """Writes model and tokenizer of a GGUF file to the directory `target`.

    Weights become bfloat16, but for files that are all float32 or float16,
    which keep their type.

    Raises:
        ModelError: as `prepare`.
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
    """Reads model and tokenizer with transformers.

    Raises:
        ModelError: it cannot, or weights are missing (it would draw them at random).
    """
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
    """Reads a file's fields and where its tensors are.

    Raises:
        ModelError: not all of that is there, or it is one part of several.
    """
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
    """The type that loses nothing if there is one, else bfloat16."""
    import torch  # noqa: PLC0415 - seconds to import, once in a model's life
    from gguf import GGMLQuantizationType as Kind  # noqa: PLC0415

    kinds = {tensor.tensor_type for tensor in reader.tensors}
    if kinds <= {Kind.F32}:
        return torch.float32
    return torch.float16 if kinds <= {Kind.F32, Kind.F16} else torch.bfloat16


def _set_end_tokens(model: Any, reader: Any) -> None:  # noqa: ANN401
    """Adds the tokens that end a turn or a message; transformers reads no end but the text's."""
    from gguf import Keys  # noqa: PLC0415

    known = model.config.eos_token_id
    ends = set(known if isinstance(known, list) else [known])
    ends |= {_field(reader, key) for key in (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)}
    ends.discard(None)
    for config in (model.config, model.generation_config):
        config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)


def _set_pre_tokenizer(tokenizer: Any, reader: Any) -> None:  # noqa: ANN401
    """Splits text as the model was trained, where the file says so only by a name."""
    from gguf import Keys  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: PLC0415

    if _field(reader, Keys.Tokenizer.PRE) in SINGLE_DIGITS:
        # Else spaces before a number come out differently.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )


def _field(reader: Any, key: str) -> Any:  # noqa: ANN401
    """A field's value; None if the file has none of that name."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
