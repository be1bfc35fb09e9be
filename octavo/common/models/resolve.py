"""Resolution of `--model` to a directory or a hub name."""

import re
from pathlib import Path

from octavo.common.models.checkpoint import why_no_model
from octavo.common.models.errors import ModelError

DEMO = "demo"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str) -> str:
    """Return the absolute path or hub name that `from_pretrained` accepts.

    `model` is "demo", a local directory, a GGUF file or a hub name; a local path wins over a hub
    name. "demo" and GGUF files are converted into the cache on first use.

    Raises:
        ModelError: The path holds no model, the name is invalid, or the conversion failed.
        OSError: A file cannot be opened.
    """
    if model == DEMO:
        from octavo.common.models import demo  # noqa: PLC0415 - imports subprocess and zipfile only for the demo

        return str(demo.prepare())
    if not model:
        raise ModelError("the model's name is empty")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path.resolve()} {why_no_model(path)}")
        return str(path.resolve())
    if path.is_file():
        from octavo.common.models import gguf  # noqa: PLC0415 - brings in much that is rarely needed

        return str(gguf.prepare(path.resolve()))
    if model.endswith(".gguf"):
        raise ModelError(f"there is no file {path.absolute()}")
    if model.startswith(("/", "./", "../", "~")) or not HUB_NAME.fullmatch(model):
        raise ModelError(
            f"{model!r} is no directory here ({path.absolute()}) and no hub name "
            "(owner/name); the demo model is called 'demo'"
        )
    return model
