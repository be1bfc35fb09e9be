"""Grammars of calls whose arguments are text between tags."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.tagged_call import Tags
from octavo.router.requests.parsers.tool_schema import (
    Argument,
    Schema,
    Values,
    arguments_of,
    refers_to_whole,
    types_of,
    values_of,
    with_definitions,
)
from octavo.router.text.lark import ANY_TEXT, Lark, either, escaped, in_terminal, sequence

_KEY = r'/[^\s<>"=]+/'
_DATE = (
    "[0-9]{4}-(02-(0[1-9]|1[0-9]|2[0-8])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
}
"""Regular expressions of string formats; each matches only a part of its format."""
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
_SPACE = r"[\s\x1c-\x1f]*"
_NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_READ_AS = {
    "null": f"{_SPACE}(null|None){_SPACE}",
    "boolean": f"{_SPACE}(true|false|True|False){_SPACE}",
    "integer": f"{_SPACE}{_NUMBER}{_SPACE}",
    "number": f"{_SPACE}{_NUMBER}{_SPACE}",
    "object": rf"{_SPACE}\{{(?s:.*)",
    "array": rf"{_SPACE}\[(?s:.*)",
}
"""Texts that may be parsed as another type than string: see `as_json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """The layout of a family's calls, with `{}` in place of a name.

    Attributes:
        call: Text from the marker or the previous call to the first argument, with the tool's name.
        text: Text before a string, with the argument's name.
        json: Text before any other value; None: the same.
        close: Text after a value.
        between: Text after `close`.
        end: Text at the end of the call.
    """

    call: str
    text: str
    json: str | None = None
    close: str
    between: str
    end: str


class TaggedGrammar:
    """Builds the grammar of a family's calls.

    Args:
        lark: The grammar to add rules to.
        tags: The family's tags, for parsing.
        layout: The family's layout, for generating.
    """

    def __init__(self, lark: Lark, tags: Tags, layout: CallLayout) -> None:
        self._lark = lark
        self._tags = tags
        self._layout = layout
        self._head, self._rest = lark.head(layout.close)
        self._pads = layout.close != tags.value_close

    def call(self, tool: OfferedTool) -> str | None:
        """Return the grammar of a call of a tool, from `CallLayout.call` to `CallLayout.end`.

        Return None if the layout cannot express the tool's schema.
        """
        schema = tool.allowed
        arguments = arguments_of(schema)
        if arguments is None or refers_to_whole(schema):
            return None
        parts = [self._lark.filled(self._layout.call, tool.name)]
        for one in arguments.named:
            written = self._argument(one, schema)
            if written is None:
                return None
            parts.append(written if one.required else f"({written})?")
        if arguments.others is not None:
            more = self._any_argument(arguments.others, schema)
            if more is None:
                return None
            parts.append(f"({more})*")
        parts.append(self._lark.marker(self._layout.end))
        return self._lark.rule("tagged", sequence(*parts))

    def _argument(self, argument: Argument, root: Schema) -> str | None:
        name = argument.name
        if name != name.strip() or not name or re.search(r'[\n<>"=]', name):
            return None
        return self._written(argument.schema, root, lambda text: self._lark.filled(text, name))

    def _any_argument(self, schema: Schema, root: Schema) -> str | None:
        """Return the grammar of an argument with any name."""
        return self._written(schema, root, self._with_any_name)

    def _with_any_name(self, text: str) -> str:
        before, _, behind = text.partition("{}")
        return sequence(
            self._lark.marker(before), self._lark.rule("KEY", _KEY), self._lark.marker(behind)
        )

    def _written(self, schema: Schema, root: Schema, named: Callable[[str], str]) -> str | None:
        """Return the grammar of an argument, including its tags."""
        values = values_of(schema, root)
        if values is None:
            return None
        marked = self._tags.attributes is not None
        texts = self._texts(values, frozenset() if marked else types_of(schema, root))
        if texts is None:
            return None
        free: Schema = {}
        others = [
            sequence(self._lark.json(with_definitions(one, root)), self._closing)
            for one in (*([free] if values.free and marked else ()), *values.others)
        ]
        if not texts and not others:
            return None
        layout = self._layout
        between = self._lark.text(layout.between) if layout.between else ""
        if layout.json is None:
            return sequence(named(layout.text), either(*texts, *others), between)
        forms = []
        if texts:
            forms.append(sequence(named(layout.text), either(*texts)))
        if others:
            forms.append(sequence(named(layout.json), either(*others)))
        return sequence(either(*forms), between)

    @property
    def _closing(self) -> str:
        return sequence(self._head, self._rest)

    def _texts(self, values: Values, types: frozenset[str]) -> list[str] | None:
        """Return the grammar of each kind of string text, and the closing tag."""
        forms = []
        if values.free:
            forms.append(self._text([]))
        for one in values.strings:
            conditions = string_conditions(one)
            if conditions is None:
                return None
            forms.append(self._text([*conditions, *(f"~/{one}/" for one in read_otherwise(types))]))
        if values.words:
            if not all(self._keeps(word, types) for word in values.words):
                return None
            words = " | ".join(map(self._lark.text, values.words))
            forms.append(self._terminal(f"({words})"))
        return forms

    def _keeps(self, word: str, types: frozenset[str]) -> bool:
        """Return whether a string between the tags is parsed as itself."""
        if self._tags.value_close in word:
            return False
        if not self._pads and self._tags.trim and word != word.strip("\n"):
            return False
        return not any(re.fullmatch(one, word) for one in read_otherwise(types))

    def _text(self, conditions: Sequence[str]) -> str:
        """Return the grammar of a text that meets all conditions, and the closing tag."""
        parts = [ANY_TEXT, *conditions, f"~/(?s:.*){escaped(self._tags.value_close)}(?s:.*)/"]
        if self._tags.trim and not self._pads:
            parts += [r"~/\n(?s:.*)/", r"~/(?s:.*)\n/"]
        return self._terminal(f"({' & '.join(parts)})")

    def _terminal(self, body: str) -> str:
        return sequence(self._lark.rule("VALUE", sequence(body, self._head)), self._rest)


def string_conditions(schema: Schema) -> list[str] | None:
    """Return the terminals that a string must match; None if terminals cannot express it."""
    conditions = []
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if shortest or longest is not None:
        if not all(isinstance(one, int) for one in (shortest, longest or 0)):
            return None
        upper = "" if longest is None else longest
        conditions.append(f"/(?s:.{{{shortest},{upper}}})/")
    if "pattern" in schema:
        pattern = found_by(schema["pattern"])
        if pattern is None:
            return None
        conditions.append(f"/{pattern}/")
    if "format" in schema:
        if schema["format"] not in FORMATS:
            return None
        conditions.append(f"/{FORMATS[schema['format']]}/")
    return conditions


def found_by(pattern: Any) -> str | None:  # noqa: ANN401 - any JSON
    """Return the grammar of a whole text that contains a match of an expression.

    Return None if it has anchors inside.
    """
    if not isinstance(pattern, str):
        return None
    pattern = with_ascii_classes(pattern)
    if pattern is None:
        return None
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)
    inner = plain.removeprefix("^").removesuffix("$")
    if "^" in inner or "$" in inner or re.search(r"\\[bBAzZG]", pattern):
        return None
    begins = pattern.startswith("^")
    ends = plain.endswith("$")
    if "|" in plain and (begins or ends):
        return None  # the anchor may belong to one alternative
    body = in_terminal(pattern[begins : len(pattern) - ends])
    return f"{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}"


def with_ascii_classes(pattern: str) -> str | None:
    """Return an expression whose digits and word characters are ASCII's, as in ECMA 262.

    Return None if brackets contain their opposites.
    """
    inside, parts = False, []
    for part in re.findall(r"\\.|.", pattern, flags=re.DOTALL):
        known = _CLASSES.get(part.lower()) if part[0] == "\\" else None
        opposite = part != part.lower()
        if known is None:
            parts.append(part)
            inside = part == "[" or (inside and part != "]")
        elif not inside:
            parts.append(f"[{'^' if opposite else ''}{known}]")
        elif not opposite:
            parts.append(known)
        else:
            return None
    return "".join(parts)


def read_otherwise(types: frozenset[str]) -> list[str]:
    """Return expressions of texts that may be parsed as a non-string, given a value's types."""
    if "string" not in types:
        return []
    return sorted({_READ_AS[one] for one in types & set(_READ_AS)})
