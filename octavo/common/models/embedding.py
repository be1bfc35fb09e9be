"""Read how a checkpoint makes an embedding of a text's hidden states.

These are the files of sentence-transformers: `modules.json` lists the steps, each in a folder.
What they do not say is refused, not guessed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.json_files import CONFIG, read_json

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
TRANSFORMER_CONFIGS = ("sentence_bert_config.json", "sentence_roberta_config.json")
STEPS = re.compile(r"Transformer( Pooling( Dense)*( Normalize)?)?")
"""The names of the steps that Octavo has."""
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
    steps = _read_modules(directory) if has_modules else []
    folders = {name: directory / path for name, path in steps}
    named = _read_pooling(folders["Pooling"]) if "Pooling" in folders else None
    if pooling is not None and named not in {None, pooling}:
        raise ModelError(
            f"--pooling is {pooling}, but {directory} pools by {named}: leave the flag out"
        )
    chosen = named or pooling
    if chosen is None:
        raise ModelError(f"{directory} does not say how it pools: set --pooling")
    sentence = _read_if_there(directory / SENTENCE_CONFIG)
    prompts = sentence.get("prompts") or {}
    default = sentence.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ModelError(f"{directory / SENTENCE_CONFIG} has no prompt {default!r}")
    return EmbeddingPlan(
        chosen,
        ("Normalize" in folders) if normalize is None else normalize,
        _max_tokens(directory),
        prompts,
        default,
        tuple(directory / path for name, path in steps if name == "Dense"),
        sentence.get("similarity_fn_name") or "",
        tuple(sorted(config.get("matryoshka_dimensions") or ())),
        matryoshka or bool(config.get("is_matryoshka")),
    )


def _read_modules(directory: Path) -> list[tuple[str, str]]:
    """Return a checkpoint's steps in order, each as the name of its class and its folder.

    Raises:
        UnsupportedModelError: Octavo has no such steps.
        ModelError: The file is damaged.
    """
    file = directory / MODULES
    try:
        modules = json.loads(file.read_bytes())
        steps = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a list of modules: download it again") from error
    if not STEPS.fullmatch(names := " ".join(name for name, _ in steps)):
        raise UnsupportedModelError(
            f"{file} lists {names or 'nothing'}, and Octavo embeds with Transformer, Pooling, and"
            " perhaps Dense and Normalize, in this order"
        )
    if steps[0][1]:
        raise UnsupportedModelError(
            f"{file} has its model in {steps[0][1]!r}: move it and the tokenizer beside {MODULES}"
        )
    return steps


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


def _max_tokens(directory: Path) -> int | None:
    """Return the maximum tokens of a text that a checkpoint names, if any.

    Raises:
        UnsupportedModelError: Its texts are changed in another way than by the tokenizer.
    """
    for name in TRANSFORMER_CONFIGS:
        config = _read_if_there(directory / name)
        if config.get("do_lower_case"):
            raise UnsupportedModelError(
                f"{directory / name} sets do_lower_case, which Octavo leaves to the tokenizer"
            )
        if isinstance(length := config.get("max_seq_length"), int):
            return length
    return None


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
