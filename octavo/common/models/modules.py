"""Read the steps of a model in the files of sentence-transformers: `modules.json` and others."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.json_files import read_json_if_there

MODULES = "modules.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
TRANSFORMER_CONFIGS = ("sentence_bert_config.json", "sentence_roberta_config.json")
STEPS = re.compile(r"Transformer( LogitScore| Pooling( Dense)*( Normalize)?)?")
"""The names of the steps that Octavo has."""


def read_modules(directory: Path) -> list[tuple[str, str]]:
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
            f"{file} lists {names or 'nothing'}, and Octavo has Transformer and LogitScore, or"
            " Transformer, Pooling, and perhaps Dense and Normalize, in this order"
        )
    if steps[0][1]:
        raise UnsupportedModelError(
            f"{file} has its model in {steps[0][1]!r}: move it and the tokenizer beside {MODULES}"
        )
    return steps


def read_prompts(saved: Mapping[str, Any], directory: Path) -> tuple[dict[str, str], str]:
    """Return the prompts of a checkpoint by name, and the default's name; empty: none.

    Args:
        saved: Content of its `SENTENCE_CONFIG`.
        directory: Its directory, for errors.

    Raises:
        ModelError: There is no default of that name.
    """
    prompts, default = saved.get("prompts") or {}, saved.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ModelError(f"{directory / SENTENCE_CONFIG} has no prompt {default!r}")
    return prompts, default


def max_tokens(directory: Path) -> int | None:
    """Return the maximum tokens of a text that a checkpoint names, if any.

    Raises:
        UnsupportedModelError: Its texts are changed in another way than by the tokenizer.
    """
    for name in TRANSFORMER_CONFIGS:
        config = read_json_if_there(directory / name)
        if config.get("do_lower_case"):
            raise UnsupportedModelError(
                f"{directory / name} sets do_lower_case, which Octavo leaves to the tokenizer"
            )
        if isinstance(length := config.get("max_seq_length"), int):
            return length
    return None
