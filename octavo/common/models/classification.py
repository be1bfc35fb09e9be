"""Read how a checkpoint makes scores of a text's hidden states: classifiers and cross-encoders.

A head is that of transformers' class for sequence classification, which `config.json` names. Models
without one may answer with a token, such as yes or no; sentence-transformers' step `LogitScore`
names these. Labels and activation are read as transformers' pipeline and sentence-transformers do.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.json_files import CONFIG, read_json, read_json_if_there
from octavo.common.models.modules import (
    MODULES,
    SENTENCE_CONFIG,
    TRANSFORMER_CONFIGS,
    max_tokens,
    read_modules,
    read_prompts,
)

CLASSIFIER = "ForSequenceClassification"
"""Suffix of the names of classes with a head."""
TOKENIZER_CONFIG = "tokenizer_config.json"
Activation = Literal["sigmoid", "softmax", "identity"]
BY_PROBLEM: dict[str, Activation] = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
"""Activations by transformers' `problem_type`."""


@dataclass(frozen=True, slots=True)
class ClassifierPlan:
    """The way from a text to the scores of its classes.

    Attributes:
        labels: Names of the classes, in the logits' order.
        activation: The function that makes scores of logits.
        max_tokens: Maximum tokens of a text; None: the model's context.
        prompt: Text that is put before each text, or the system message of a chat.
        answers: Tokens whose next logits are the score: that of the first, less that of the second
            if there is one. Texts are pairs then, laid out as chats. None: the model has a head.
        opens_answer: Whether such a chat opens the answer.
    """

    labels: tuple[str, ...]
    activation: Activation
    max_tokens: int | None = None
    prompt: str = ""
    answers: tuple[int, ...] | None = None
    opens_answer: bool = False


def classifies(directory: Path) -> bool:
    """Return whether a model's files say that it classifies texts."""
    steps = _steps(directory)
    names = read_json(directory / CONFIG).get("architectures") or ()
    has_head = any(str(name).endswith(CLASSIFIER) for name in names)
    return "LogitScore" in steps or (has_head and set(steps) <= {"Transformer"})


def read_classifier(directory: Path) -> ClassifierPlan | None:
    """Return how a model's directory classifies; None if it does not.

    Raises:
        UnsupportedModelError: Octavo does not have its activation.
        ModelError: A file is damaged.
    """
    if not classifies(directory):
        return None
    config, saved = read_json(directory / CONFIG), read_json_if_there(directory / SENTENCE_CONFIG)
    folder = _steps(directory).get("LogitScore")
    answers = None if folder is None else _answers(directory / folder / CONFIG)
    labels, opens = (
        (_labels(config), False) if answers is None else (("LABEL_0",), _opens(directory))
    )
    tokenizer = read_json_if_there(directory / TOKENIZER_CONFIG).get("model_max_length")
    longest = tokenizer if isinstance(tokenizer, int) and tokenizer < 1 << 31 else None
    prompts, default = read_prompts(saved, directory)
    return ClassifierPlan(
        labels,
        _activation(directory, config, saved, len(labels)),
        max_tokens(directory) or longest,
        prompts[default] if default else "",
        answers,
        opens,
    )


def _steps(directory: Path) -> dict[str, str]:
    """Return the folders of sentence-transformers' steps, by the names of their classes."""
    return dict(read_modules(directory)) if (directory / MODULES).is_file() else {}


def _answers(file: Path) -> tuple[int, ...]:
    config = read_json(file)
    named = (config.get("true_token_id"), config.get("false_token_id"))
    tokens = tuple(token for token in named if isinstance(token, int))
    if not isinstance(named[0], int):
        raise ModelError(f"{file} has no true_token_id: download it again")
    return tokens


def _opens(directory: Path) -> bool:
    """Return whether the chats of pairs open the answer.

    Raises:
        UnsupportedModelError: Their template has other arguments.
    """
    config = read_json_if_there(directory / TRANSFORMER_CONFIGS[0]).get("processing_kwargs") or {}
    arguments: dict[str, Any] = dict(config.get("chat_template") or {})
    opens = bool(arguments.pop("add_generation_prompt", False))
    if arguments:
        raise UnsupportedModelError(
            f"{directory / TRANSFORMER_CONFIGS[0]} sets the chat template's {min(arguments)},"
            " which Octavo does not for pairs of texts"
        )
    return opens


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the classes' names; transformers saves neither two without names nor their number."""
    named: dict[str, Any] = config.get("id2label") or {}
    number = len(named) or config.get("num_labels") or 2
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(number))


def _activation(
    directory: Path, config: dict[str, Any], saved: dict[str, Any], labels: int
) -> Activation:
    """Return the activation that a checkpoint names, or that transformers has for its problem.

    Raises:
        UnsupportedModelError: Octavo does not have it.
    """
    trained = config.get("sentence_transformers") or {}
    older = config.get("sbert_ce_default_activation_function")
    if named := saved.get("activation_fn") or trained.get("activation_fn") or older:
        name = str(named).rpartition(".")[2].lower()
    elif problem := config.get("problem_type"):
        name = BY_PROBLEM.get(problem, str(problem))
    else:
        name = "sigmoid" if labels == 1 else "softmax"
    for known in get_args(Activation):
        if name == known:
            activation: Activation = known
            return activation
    raise UnsupportedModelError(
        f"{directory} makes scores of logits by {name}, and Octavo by one of"
        f" {', '.join(get_args(Activation))}"
    )
