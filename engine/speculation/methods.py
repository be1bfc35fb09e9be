"""The methods of drafting by name, and what `--speculation` makes of them."""

from collections.abc import Callable

from octavo.engine.speculation.method import Method
from octavo.engine.speculation.policy import DraftPolicy
from octavo.engine.speculation.prompt_lookup import PromptLookup
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.speculation.suffix_lookup import SuffixLookup

METHODS: dict[str, tuple[Callable[[], Method], str]] = {
    "ngram": (PromptLookup, "what followed the same tokens in the request's prompt or output"),
    "suffix": (SuffixLookup, "what most often followed them there or in earlier outputs"),
}
"""Each method's class and what it drafts, by its name."""
AUTO_METHOD = "suffix"
"""The method of `auto`."""


def make_speculation(name: str, num_tokens: int) -> Speculation | None:
    """Return what drafts tokens under a value of `--speculation`; None for `off`.

    Args:
        name: `off`, `auto` or a method's name.
        num_tokens: the most tokens of a draft.
    """
    if name == "off":
        return None
    if name == "auto":
        return Speculation(METHODS[AUTO_METHOD][0](), num_tokens, DraftPolicy(num_tokens))
    return Speculation(METHODS[name][0](), num_tokens)
