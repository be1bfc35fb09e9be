"""Converts a constraint to a grammar of llguidance."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind
from octavo.engine.constraints.markers import hide_references, shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"[ \t\n\r]{1,8}"
"""Whitespace between two parts of a JSON document; none at its end. It is bounded, because many
models, especially small ones, would never stop writing it."""
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")
"""Special characters of regular expressions."""
DEFAULT_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": WHITESPACE}
"""Options of JSON Schemas; `x-guidance` in a schema replaces them."""
FIXED_OPTIONS: "JsonCompileOptions" = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Options that no schema can change. `json_allowed_escapes` lacks `u`: otherwise a name in
`properties` could be spelled differently and have a value that its schema forbids."""
EMBEDDED = "%json"
GBNF_RULE = "::="
MAX_ERROR = 1000
"""Maximum characters of an error message of the library."""


def parser_limits() -> LLParserLimits:
    """Return the limits of a grammar's size, and of the work and memory of one mask."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def compile_grammar(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of an output.

    It takes milliseconds to seconds, without Python's lock.

    Raises:
        ConstraintError: The constraint is not valid, not supported or exceeds a limit.
    """
    try:
        matcher = LLMatcher(tokens, to_grammar(constraint), log_level=0, limits=parser_limits())
    except ValueError as error:
        raise ConstraintError(shorten(str(error))) from None
    if matcher.is_error():
        raise ConstraintError(shorten(matcher.get_error()))
    return matcher


def to_grammar(constraint: Constraint) -> str:
    """Return a constraint in llguidance's form.

    Raises:
        ValueError: It is not JSON.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            (schema,) = constraint.texts
            return _json_grammar(_as_object(schema))
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar('{"type": "object"}')
        case ConstraintKind.REGEX:
            (expression,) = constraint.texts
            return LLMatcher.grammar_from_regex(expression)
        case ConstraintKind.GRAMMAR:
            (grammar,) = constraint.texts
            return LLMatcher.grammar_from_lark(hide_references(_with_options(grammar)))
        case ConstraintKind.EBNF:
            (grammar,) = constraint.texts
            return LLMatcher.grammar_from_lark(hide_references(_with_options(_as_lark(grammar))))
        case ConstraintKind.CHOICES:
            return LLMatcher.grammar_from_regex("|".join(map(_literal, constraint.texts)))


def _as_lark(grammar: str) -> str:
    """Return a grammar in Lark's notation, in which it may be already.

    Raises:
        ValueError: It has GBNF's sign of a rule, but is no GBNF.
    """
    if GBNF_RULE not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises what it likes
        raise ValueError(f"it is no GBNF: {error}") from error


def schemas(constraint: Constraint) -> list[object]:
    """Return the JSON Schemas of a constraint, including those after `%json` in a grammar."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            try:
                return [json.loads(constraint.texts[0])]
            except (ValueError, RecursionError):
                return []  # llguidance reports where it is wrong
        case ConstraintKind.GRAMMAR:
            return [schema for schema, _, _ in _embedded(constraint.texts[0])]
        case _:
            return []


def _as_object(schema: str) -> str:
    """Return a schema as an object, which llguidance needs even for a boolean.

    Raises:
        ValueError: It is not a schema, or it is false.
    """
    match schema.strip()[:1]:
        case "{":
            return schema
        case "t":
            return "{}" if schema.strip() == "true" else schema
        case "f":
            raise ValueError("#: it is false, so no output keeps to it")
        case _:
            raise ValueError("#: it must be a JSON object or a boolean")


def _json_grammar(schema: str) -> str:
    """Return the grammar of a JSON Schema; unsupported parts are an error later."""
    return LLMatcher.grammar_from_json_schema(
        schema, defaults=DEFAULT_OPTIONS, overrides=FIXED_OPTIONS
    )


def _with_options(grammar: str) -> str:
    """Return a Lark grammar whose JSON Schemas have the options of a separate schema."""
    parts, end = [], 0
    for schema, start, after in _embedded(grammar):
        if isinstance(schema, dict):
            schema_options = schema.get("x-guidance")
            options = (
                DEFAULT_OPTIONS
                | (schema_options if isinstance(schema_options, dict) else {})
                | FIXED_OPTIONS
            )
            text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
            parts += [grammar[end:start], text]
            end = after
    return "".join([*parts, grammar[end:]])


def _embedded(grammar: str) -> Iterator[tuple[object, int, int]]:
    """Yield each JSON Schema after `%json` in a Lark grammar, with its start and end."""
    decoder, place = json.JSONDecoder(), 0
    while (place := grammar.find(EMBEDDED, place)) >= 0:
        place += len(EMBEDDED)
        start = place + len(grammar[place:]) - len(grammar[place:].lstrip())
        try:
            schema, place = decoder.raw_decode(grammar, start)
        except (ValueError, RecursionError):
            continue  # in a string or a comment, or llguidance reports where it is wrong
        yield schema, start, place


def _literal(text: str) -> str:
    """Return a regular expression that matches exactly a text."""
    return "".join("\\" + c if c in _SPECIAL else c for c in text)


def shorten(message: str) -> str:
    """Return the library's message without its dump of the parser's state."""
    for mark in ("<state>", "<non-verbose/>"):
        message = message.partition(mark)[0]
    if "NoExtension" in message:
        message = "no text continues it as the constraint says"
    return shown(message).strip()[:MAX_ERROR]
