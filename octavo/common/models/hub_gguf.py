"""Downloads GGUF files that are named by their type, such as owner/name:Q4_K_M."""

import re
from collections.abc import Iterable
from pathlib import Path

from octavo.common.models import hub
from octavo.common.models.errors import ModelError

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.][\w./-]*)?):([\w.-]+)")
"""A model on the hub, with an optional revision, and the type of one of its files."""
PART = re.compile(r"-\d{5}-of-\d{5}$")
"""End of a split file's name, without .gguf."""


def split(name: str) -> tuple[str, str] | None:
    """Split a name into a hub model and a file's type; None if it is no such name.

    A revision may be before the type or at the end.
    """
    before, at, revision = name.rpartition("@")
    if at and ":" in before and ":" not in revision:
        model, _, kind = before.partition(":")
        name = f"{model}@{revision}:{kind}"
    match = NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def fetch(model: str, kind: str) -> Path:
    """Return a GGUF file of a hub model, the first if it is split; download what is missing.

    Args:
        model: Its name on the hub, with an optional revision.
        kind: What the file's name ends with, such as Q4_K_M.

    Raises:
        ModelError: There is no such file, or it cannot be downloaded.
    """
    info = hub.look_up(model)
    if isinstance(info, Path):
        names = [str(path.relative_to(info)) for path in info.rglob("*.gguf")]
        return info / choose(model, kind, names)[0]
    chosen = choose(model, kind, [file.rfilename for file in info.siblings or ()])
    return hub.download(model, info, chosen) / chosen[0]


def choose(model: str, kind: str, names: Iterable[str]) -> list[str]:
    """Return the files of one type, in order.

    Args:
        model: The model, for errors.
        kind: What their names end with, in any case.
        names: All files of the model.

    Raises:
        ModelError: There is none, or there are several that are not parts of one.
    """
    models = by_model(names)
    if not models:
        raise ModelError(f"the model {model!r} of the hub has no GGUF files")
    end = re.compile(rf"(^|[-_./]){re.escape(kind)}$", re.IGNORECASE)
    chosen = [stem for stem in models if end.search(stem)]
    if len(chosen) != 1:
        there = ", ".join(sorted(Path(stem).name for stem in chosen or models))
        found = "several GGUF files" if chosen else "no GGUF file"
        raise ModelError(f"the model {model!r} of the hub has {found} of {kind}; there is: {there}")
    return models[chosen[0]]


def by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of each model, in order, by their name without part and suffix.

    The projectors of image models are no models.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and "mmproj" not in name.lower():
            models.setdefault(PART.sub("", name.removesuffix(".gguf")), []).append(name)
    return models
