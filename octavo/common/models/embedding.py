"""Read how a checkpoint makes an embedding of a text's hidden states.

These are the files of sentence-transformers: `modules.json` lists the steps, each in a folder.
What they do not say is refused, not guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from octavo.common.models.classification import classifies
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.json_files import CONFIG, read_json, read_json_if_there
from octavo.common.models.modules import (
    MODULES,
    SENTENCE_CONFIG,
    max_tokens,
    read_modules,
    read_prompts,
)

Pooling = Literal["mean", "cls", "last", "max"]
POOLING_NAMES = {
    "mean_tokens": "mean",
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
}
"""Poolings by the suffixes of their settings `pooling_mode_...`."""


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """The way from a text's hidden states to its embedding.

    Attributes:
        pooling: How hidden states become one: their mean or maximum, or the first or last one.
        normalize: Whether embeddings have length 1.
        max_tokens: Maximum tokens of a text; None: the model's context.
        prompts: Texts that may be put before a text, by name.
        default_prompt: Name of the prompt of requests that name none; empty: none.
        dense: Folders of linear layers that follow the pooling, in order.
        similarity: The function that compares embeddings; empty: unknown.
        dimensions: Numbers of leading dimensions that are embeddings too (Matryoshka).
        any_dimensions: Whether any number of leading dimensions is one.
    """

    pooling: Pooling
    normalize: bool
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dense: tuple[Path, ...] = ()
    similarity: str = ""
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False


def read_plan(
    directory: Path,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    matryoshka: bool = False,
) -> EmbeddingPlan | None:
    """Return how a model's directory embeds; None if neither it nor the settings say so.

    Args:
        directory: The model's directory.
        pooling: The pooling of a checkpoint that names none.
        normalize: Whether to normalize; None: as the checkpoint says, or not if it says nothing.
        matryoshka: Whether any number of leading dimensions is an embedding.

    Raises:
        UnsupportedModelError: Octavo has no such step.
        ModelError: A file is damaged, or contradicts the settings.
    """
    has_modules = (directory / MODULES).is_file()
    if not has_modules and pooling is None:
        return None
    config = read_json(directory / CONFIG)
    steps = read_modules(directory) if has_modules else []
    folders = {name: directory / path for name, path in steps}
    named = _read_pooling(folders["Pooling"]) if "Pooling" in folders else None
    if pooling is not None and named not in {None, pooling}:
        raise ModelError(
            f"--pooling is {pooling}, but {directory} pools by {named}: leave the flag out"
        )
    chosen = named or pooling
    if chosen is None and classifies(directory):
        return None
    if chosen is None:
        raise ModelError(f"{directory} does not say how it pools: set --pooling")
    sentence = read_json_if_there(directory / SENTENCE_CONFIG)
    prompts, default = read_prompts(sentence, directory)
    return EmbeddingPlan(
        chosen,
        ("Normalize" in folders) if normalize is None else normalize,
        max_tokens(directory),
        prompts,
        default,
        tuple(directory / path for name, path in steps if name == "Dense"),
        sentence.get("similarity_fn_name") or "",
        tuple(sorted(config.get("matryoshka_dimensions") or ())),
        matryoshka or bool(config.get("is_matryoshka")),
    )


def _read_pooling(folder: Path) -> Pooling:
    """Return the pooling that a checkpoint names.

    Raises:
        UnsupportedModelError: Octavo does not pool so.
    """
    config = read_json(folder / CONFIG)
    if config.get("include_prompt") is False:
        raise UnsupportedModelError(
            f"{folder / CONFIG} leaves prompts out of the pooling, which Octavo does not do"
        )
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or ())
    modes += [
        name.removeprefix("pooling_mode_")
        for name, chosen in config.items()
        if name.startswith("pooling_mode_") and chosen
    ]
    kinds = {POOLING_NAMES.get(mode, mode) for mode in modes}
    for kind in get_args(Pooling):
        if kinds == {kind}:
            pooling: Pooling = kind
            return pooling
    raise UnsupportedModelError(
        f"{folder / CONFIG} pools by {', '.join(sorted(kinds)) or 'nothing'}, and Octavo by one of"
        f" {', '.join(get_args(Pooling))}"
    )
