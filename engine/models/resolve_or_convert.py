"""Resolves `--model` to a directory; converts a GGUF file first."""

from octavo.common.models.resolve import DEMO, gguf_file, resolve_checkpoint
from octavo.common.models.resolve import resolve_config as resolve_checkpoint_config
from octavo.engine.models.gguf_conversion.conversion import prepare


def resolve(model: str, *, packed: bool = False) -> str:
    """Return the absolute path of a model's directory.

    Args:
        model: "demo", a GGUF file, a local directory or a hub name, perhaps with @REVISION. "demo"
            and GGUF files are converted into the cache on first use.
        packed: Whether a GGUF file's weights stay in its blocks if possible.

    Raises:
        ModelError: The path holds no model, the name is invalid, the conversion failed, or the hub
            does not have the model or cannot be reached.
        OSError: A file cannot be opened.
    """
    return _converted(model, packed=packed) or resolve_checkpoint(model)


def resolve_config(model: str, *, packed: bool = False) -> str:
    """Return the absolute path of a directory with a model's config, and perhaps its weights.

    For a model of the hub, only the config is downloaded. The arguments are those of `resolve`.

    Raises:
        ModelError: See `resolve`.
        OSError: A file cannot be opened.
    """
    return _converted(model, packed=packed) or resolve_checkpoint_config(model)


def _converted(model: str, *, packed: bool) -> str | None:
    """Return the directory of a converted GGUF file; None if a name is not such a file.

    Raises:
        ModelError: The file cannot be fetched or converted.
        OSError: It cannot be opened.
    """
    file = gguf_file(model)
    return None if file is None else str(prepare(file, packed=packed and model != DEMO))
