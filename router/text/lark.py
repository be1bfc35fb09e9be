"""Builds grammars in llguidance's dialect of Lark from markers, texts and JSON Schemas."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.common.topology import format_list
from octavo.router.text.model_text import ModelText

COMPACT = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON separators of chat templates; with free white space, a model could write it forever."""
PREFIX = "octavo_"
ANY_TEXT = "/(?s:.*)/"


class Lark:
    """A grammar under construction.

    A marker that is a single token is matched by id, so that no other spelling matches.

    Args:
        model: The model's markers.
        eos_token_ids: End-of-sequence tokens, which no rule matches.
    """

    def __init__(self, model: ModelText, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._eos = eos_token_ids
        self._rules: dict[str, tuple[str, str]] = {}
        self._sources: list[str] = []
        self._parts: dict[str, list[str]] = {}  # parts of texts, cached

    @property
    def template(self) -> str:
        """The model's chat template."""
        return self._model.template

    def token(self, text: str) -> int | None:
        """Return the id of a marker that llguidance treats as one token; None for other texts."""
        token_id = self._model.tokens.get(text)
        if text in self._model.special or (text.startswith("<") and text.endswith(">")):
            return token_id
        return None

    def marker(self, text: str) -> str:
        """Return the grammar of a text that may contain markers."""
        return sequence(*map(self._piece, self.parts(text)))

    def _piece(self, part: str) -> str:
        token_id = self.token(part)
        return self.text(part) if token_id is None else f"<[{token_id}]>"

    def text(self, text: str) -> str:
        """Return the grammar of a text."""
        return json.dumps(text)

    def parts(self, text: str) -> list[str]:
        """Split a text at the markers that are single tokens."""
        if text not in self._parts:
            self._parts[text] = self._cut(text)
        return self._parts[text]

    def _cut(self, text: str) -> list[str]:
        markers = [one for one in self._model.tokens if one in text and self.token(one) is not None]
        if not markers:
            return [text] if text else []
        longest = sorted(markers, key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, longest))})", text) if part]

    def filled(self, text: str, name: str) -> str:
        """Return the grammar of a text with markers, and with a name in place of `{}`."""
        return sequence(*(self._piece(part.replace("{}", name)) for part in self.parts(text)))

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name, whose prefix no client's rule has."""
        prefix = PREFIX.upper() if name.isupper() else PREFIX
        attributes = name[name.find("[") :] if "[" in name else ""
        stem = f"{prefix}{name.removesuffix(attributes)}"
        for other, known in self._rules.items():
            if known == (attributes, body) and other.startswith(stem):
                return other
        unique = f"{stem}_{len(self._rules)}"
        self._rules[unique] = attributes, body
        return unique

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for the JSON values of a schema, in chat templates' layout."""
        return self.rule("json", f"%json {json.dumps({**schema, 'x-guidance': COMPACT})}")

    def document(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for the JSON documents of a schema, with any white space."""
        return self.rule("json", f"%json {json.dumps(schema)}")

    def regex(self, expression: str) -> str:
        """Return a rule for texts that match a regular expression."""
        return self.rule("TEXT", f"/{in_terminal(expression)}/")

    def include(self, grammar: str) -> str:
        """Add a whole grammar; return the new name of its start rule."""
        name = f"{PREFIX}included"
        self._sources.append(rename(grammar, "start", name))
        return name

    def tokens_but(self, *markers: str) -> str | None:
        """Return the grammar of one token, except some markers and end-of-sequence tokens.

        Return None if a marker is not a token.
        """
        ids = [self.token(marker) for marker in markers]
        if None in ids:
            return None
        excluded = sorted({*self._eos, *(i for i in ids if i is not None)})
        return f"<[^{','.join(map(str, excluded))}]>" if excluded else "<[*]>"

    def head(self, marker: str) -> tuple[str, str]:
        """Return the end that a terminal needs before a marker, and the grammar of the rest.

        Terminals are greedy, so the marker's text part must belong to the terminal.
        """
        first, *others = self.parts(marker)
        if self.token(first) is not None:
            return "", self.marker(marker)
        return self.text(first), sequence(*map(self._piece, others))

    def until(self, marker: str, *others: str) -> str:
        """Return the grammar of text up to and including a marker, without some other markers."""
        plain = self._plain([marker, *others])
        head, rest = self.head(marker)
        last = self.rule("TEXT", f"({plain}) {head}" if head else plain)
        tokens = self._other_tokens([marker, *others])
        before = f"({self.rule('TEXT', plain)} <[{tokens}]>)*" if tokens else ""
        return sequence(before, last, rest)

    def without(self, *markers: str, first: str = "") -> str:
        """Return the grammar of any text, perhaps empty, without some markers.

        No spelling of them is allowed, as output parsers see text, not tokens.

        Args:
            markers: The markers.
            first: A character that the text must not begin with, after white space.
        """
        plain = start = self.rule("TEXT", self._plain(markers))
        if first:
            begins = rf"~/[\s\x1c-\x1f]*{escaped(first)}(?s:.*)/"
            start = self.rule("TEXT", f"{self._plain(markers)} & {begins}")
        others = self._other_tokens(markers)
        return sequence(start, f"(<[{others}]> {plain})*") if others else start

    def _plain(self, markers: Iterable[str]) -> str:
        """Return a terminal for text without markers or tokens that are not text."""
        # A negation alone may match tokens that are not text.
        return f"{ANY_TEXT} & ~/(?s:.*)({'|'.join(map(escaped, markers))})(?s:.*)/"

    def _other_tokens(self, markers: Iterable[str]) -> str:
        """Return the ranges of tokens, except markers, that no text terminal matches."""
        excluded = self._eos | {self.token(part) for one in markers for part in self.parts(one)}
        ids = (i for one, i in self._model.tokens.items() if self.token(one) is not None)
        return format_list(set(ids) - excluded)

    def render(self, start: str) -> str:
        """Return the grammar with this start rule."""
        rules = (f"{name}{kind}: {body}" for name, (kind, body) in self._rules.items())
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, *self._sources, ""])


def sequence(*parts: str) -> str:
    """Return the grammar of a sequence of parts."""
    return " ".join(filter(None, parts))


def either(*parts: str) -> str:
    """Return the grammar of one of several parts."""
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


_WORDS = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/)|%json\s*(?P<json>\{)"""
    r"|(?P<word>[\w-]+)",
)


def rename(grammar: str, old: str, new: str) -> str:
    """Rename a rule in a grammar, except in its strings."""
    parts, at = [], 0
    while (match := _WORDS.search(grammar, at)) is not None:
        parts.append(grammar[at : match.start()])
        at = match.end()
        if match["json"]:
            try:
                at = json.JSONDecoder().raw_decode(grammar, match.start("json"))[1]
            except ValueError:
                at = match.end()
        text = grammar[match.start() : at]
        parts.append(new if match["word"] == old else text)
    return "".join([*parts, grammar[at:]])


def in_terminal(expression: str) -> str:
    """Escape slashes and line breaks in a regular expression for a terminal."""
    spelt = {"/": r"\/", "\n": r"\n"}
    return re.sub(
        r"\\.|/|\n", lambda match: spelt.get(match[0], match[0]), expression, flags=re.DOTALL
    )


def escaped(text: str) -> str:
    """Return a regular expression that matches a text literally."""
    return "".join(
        f"\\{c}" if c.isascii() and not c.isalnum() and c not in "<> _" else c for c in text
    )
