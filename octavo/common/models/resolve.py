"""Resolves `--model` and `--tokenizer` to a directory."""

import re
from pathlib import Path

from octavo.common.models import hub, hub_gguf
from octavo.common.models.checkpoint import why_no_model
from octavo.common.models.errors import ModelError
from octavo.common.models.json_files import CONFIG

DEMO = "demo"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w.][\w./-]*)?")
"""A model's name on the hub, with an optional revision."""


def resolve_checkpoint(model: str) -> str:
    """Return the absolute path of a model's directory, or of its GGUF file.

    Args:
        model: A local path or a hub name, optionally with @REVISION; a local path takes precedence.
            Hub models are downloaded. For a GGUF file of the hub, see `gguf_file`.

    Raises:
        ModelError: The path holds no model, the name is invalid, or the hub lacks the model or is
            unreachable.
    """
    return str(_local_model(model) or hub.fetch_model(model))


def resolve_config(model: str) -> str:
    """Return the absolute path of a directory with a model's config, perhaps without weights.

    For a hub model, only the config is downloaded. The argument is as in `resolve_checkpoint`.

    Raises:
        ModelError: See `resolve_checkpoint`.
    """
    return str(_local_model(model) or hub.fetch_config(model))


def resolve_tokenizer(source: str) -> str:
    """Return the absolute path of a tokenizer's directory, which need not contain a model.

    Raises:
        ModelError: There is no tokenizer, or it cannot be downloaded or created.
        OSError: A file cannot be opened.
    """
    if (file := gguf_file(source)) is not None:
        from octavo.common.models.gguf import reader  # noqa: PLC0415 - has rarely needed imports

        return str(reader.prepare_tokenizer(file))
    return str(_directory(source) or hub.fetch_tokenizer(source))


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name refers to, or None; a file of the hub is downloaded.

    Raises:
        ModelError: The file is of the hub or the demo's, and cannot be downloaded.
    """
    if name == DEMO:
        from octavo.common.models import demo  # noqa: PLC0415 - imports subprocess and zipfile only for the demo

        return demo.file()
    path = Path(name).expanduser()
    if name and path.is_file():
        return path.resolve()
    if (of_hub := hub_gguf.split(name)) is not None:
        return hub_gguf.fetch(*of_hub)
    return None


def _local_model(model: str) -> Path | None:
    """Return the directory of a local model; None for a hub name.

    Raises:
        ModelError: The name is neither a path nor a hub name, or the directory has no config.
    """
    directory = _directory(model)
    if directory is not None and not (directory / CONFIG).is_file():
        raise ModelError(f"{directory} {why_no_model(directory)}")
    return directory


def _directory(name: str) -> Path | None:
    """Return the directory that a name refers to; None for a hub name.

    Raises:
        ModelError: The name is neither a path nor a hub name.
    """
    if not name:
        raise ModelError("the model's name is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if name.endswith(".gguf"):
        raise ModelError(f"there is no file {path.absolute()}")
    base_name, revision = hub.split_revision(name)
    if revision is not None and (base_name == DEMO or Path(base_name).expanduser().exists()):
        raise ModelError(
            f"--revision is for models of the hub, and {base_name!r} is on this machine"
        )
    if name.startswith(("/", "./", "../", "~")) or not HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} is not a local directory ({path.absolute()}) and not a hub name "
            "(owner/name); the demo model is called 'demo'"
        )
    return None
