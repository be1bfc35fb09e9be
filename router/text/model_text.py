"""A model's chat template and markers, from its tokenizer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import structlog
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_parsing.response_templates import load_response_template

log = structlog.get_logger(__name__)

_OVER_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content|\[['\"]content['\"]\])")
"""A template's loop over the parts of a message's content."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's chat template and added tokens.

    Attributes:
        template: Chat template, the one for tools if the model has several; may be empty.
        has_tools: Whether the template supports tools.
        tokens: Ids of the added tokens, by spelling.
        special: Spellings of tokens that decoding omits.
        shows_images: Whether the template lays out the parts of contents, images among them.
        response_template: Description of the model's outputs in transformers' format, if any.
    """

    template: str = ""
    has_tools: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    shows_images: bool = False
    response_template: dict[str, Any] | None = None

    def mentions(self, *texts: str) -> bool:
        """Return whether the template or an added token contains one of some texts."""
        return any(text in self.template or text in self.tokens for text in texts)

    def ids(self, texts: frozenset[str]) -> frozenset[int]:
        """Return the ids of special tokens that are equal to or part of some texts."""
        known = texts & self.special
        parts = {one for one in self.special if any(one in text for text in texts - known)}
        return frozenset(self.tokens[one] for one in known | parts)


def model_text(tokenizer: PreTrainedTokenizerBase, *, images: bool = False) -> ModelText:
    """Read a tokenizer's template and tokens.

    Args:
        tokenizer: The tokenizer.
        images: Whether its model reads images.
    """
    templates = tokenizer.chat_template or ""
    if isinstance(templates, dict):
        templates = templates.get("tool_use") or templates.get("default") or ""
    added = tokenizer.added_tokens_decoder
    return ModelText(
        template=templates,
        has_tools="tools" in _variables(templates),
        tokens={token.content: i for i, token in added.items()},
        special=frozenset(token.content for token in added.values() if token.special),
        shows_images=images and _OVER_PARTS.search(templates) is not None,
        response_template=_response_template(tokenizer),
    )


def _response_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Return a tokenizer's response template, if it has a working one."""
    template: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    try:
        load_response_template(template)
    except ValueError as error:
        log.warning("response_template is not used", reason=str(error))
        return None
    return template


def _variables(template: str) -> set[str]:
    """Return a template's variables; empty for an invalid template."""
    # transformers' environment has a tag of its own, which marks the assistant's text.
    environment = chat_template_utils._compile_jinja_template("").environment  # noqa: SLF001
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateError:
        return {"tools"} if "tools" in template else set()
