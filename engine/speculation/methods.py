"""Draft methods by name, and the speculation of each value of `--speculation`."""

from collections.abc import Callable

from octavo.engine.speculation.method import Method
from octavo.engine.speculation.policy import DraftPolicy
from octavo.engine.speculation.prompt_lookup import PromptLookup
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.speculation.suffix_lookup import SuffixLookup

METHODS: dict[str, Callable[[], Method]] = {"ngram": PromptLookup, "suffix": SuffixLookup}
"""Method classes by name, as in `method_names.py`; a draft model has none."""
AUTO_METHOD = "suffix"
"""The method of `auto`."""


def make_speculation(name: str, num_tokens: int) -> Speculation | None:
    """Return the speculation of a value of `--speculation`; None for `off`.

    Args:
        name: `off`, `auto`, `draft` or a method's name.
        num_tokens: Maximum tokens of a draft.
    """
    if name == "off":
        return None
    if name == "draft":
        return Speculation(None, num_tokens)
    if name == "auto":
        return Speculation(METHODS[AUTO_METHOD](), num_tokens, DraftPolicy(num_tokens))
    return Speculation(METHODS[name](), num_tokens)
