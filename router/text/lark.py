"""Grammars in llguidance's dialect of Lark, made of a model's markers, texts and JSON Schemas."""

import json
from collections.abc import Mapping
from typing import Any

from octavo.router.text.model_text import ModelText

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it: a model that is sure of nothing could go on with white space
for ever."""
ANY_TEXT = "/(?s:.*)/"


class Lark:
    """A grammar in the making.

    A marker that is one token is matched by its id, so that no other spelling is taken for it.

    Args:
        model: The model's markers.
        eos_token_ids: Tokens that end an output; no rule matches them.
    """

    def __init__(self, model: ModelText, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._eos = eos_token_ids
        self._rules: dict[str, str] = {}

    @property
    def template(self) -> str:
        """The model's chat template."""
        return self._model.template

    def token(self, text: str) -> int | None:
        """Return the id of a marker that llguidance treats as one token."""
        token_id = self._model.tokens.get(text)
        if text in self._model.special or (text.startswith("<") and text.endswith(">")):
            return token_id
        return None

    def marker(self, text: str) -> str:
        """Return what matches a marker."""
        token_id = self.token(text)
        return self.text(text) if token_id is None else f"<[{token_id}]>"

    def text(self, text: str) -> str:
        """Return what matches a text."""
        return json.dumps(text)

    def part(self, text: str) -> str:
        """Return what matches a marker, if a text is one, or the text."""
        return self.text(text) if self.token(text) is None else self.marker(text)

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name, which gets a number if there is another of it."""
        for other in self._rules:
            if self._rules[other] == body and other.rstrip("0123456789_") == name:
                return other
        if name in self._rules:
            name = f"{name}_{len(self._rules)}"
        self._rules[name] = body
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule of the JSON values that a schema accepts."""
        return self.rule("json", f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}")

    def tokens_but(self, *markers: str) -> str | None:
        """Return what matches any token that is not one of some markers, and ends no output.

        None if a marker is no token.
        """
        ids = [self.token(marker) for marker in markers]
        if None in ids:
            return None
        excluded = sorted({*self._eos, *(i for i in ids if i is not None)})
        return f"<[^{','.join(map(str, excluded))}]>" if excluded else "<[*]>"

    def until(self, marker: str) -> str:
        """Return what matches any text up to and with a marker."""
        token = self.tokens_but(marker)
        if token is not None:
            return f"{token}* {self.marker(marker)}"
        return self.rule("text_lazy[lazy]", f"{ANY_TEXT[:-1]}{_escaped(marker)}/")

    def without(self, *markers: str) -> str:
        """Return what matches any text, perhaps none, that has none of some markers."""
        token = self.tokens_but(*markers)
        if token is not None:
            return f"{token}*"
        # A negation may match what is no text, hence the other half.
        found = "|".join(map(_escaped, markers))
        return self.rule("TEXT", f"{ANY_TEXT} & ~/(?s:.*)({found})(?s:.*)/")

    def render(self, start: str) -> str:
        """Return the grammar with this first rule."""
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        return "\n".join(["%llguidance {}", *lines, ""])


def sequence(*parts: str) -> str:
    """Return what matches some parts, one after the other."""
    return " ".join(filter(None, parts))


def either(*parts: str) -> str:
    """Return what matches one of some parts."""
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _escaped(text: str) -> str:
    """Return a regular expression that matches a text."""
    return "".join(c if c.isalnum() or c in "<> _" else f"\\{c}" for c in text)
