"""Where a model's files are: what `--model` may say."""

import re
from pathlib import Path

from octavo.common.models.errors import ModelError

DEMO = "demo"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str) -> str:
    """Turns `--model` into what `from_pretrained` takes.

    Args:
        model: "demo", a local directory, a GGUF file or a hub name. What is
            there wins over a hub name that is spelt like it.

    Returns:
        An absolute path, or the hub name as it was given. For "demo" and for a
        GGUF file the path of a directory in the cache that is made on first use,
        which takes half a minute for a small model.

    Raises:
        ModelError: the path does not exist or holds no model, the name is no
            hub name, or the model could not be converted.
        OSError: a file cannot be opened.
    """
    if model == DEMO:
        from octavo.common.models import demo  # noqa: PLC0415 - imports subprocess and zipfile only for the demo

        return str(demo.prepare())
    if not model:
        raise ModelError("the model's name is empty")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            held = next(path.glob("*.gguf"), None)
            hint = f"; for {held.name}, give the file's own path" if held else ""
            raise ModelError(f"{path.resolve()} holds no model: it has no config.json{hint}")
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
