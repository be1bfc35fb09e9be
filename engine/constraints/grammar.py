"""Turn a constraint into a grammar of llguidance."""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind

WHITESPACE = r"[ \t\n\r]{1,40}"
"""Whitespace between the parts of a JSON document. Its length is bounded, because many models,
small ones above all, go on with it for ever once they have begun."""
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")
"""Characters that mean something in a regular expression."""
MAX_ERROR = 1000
"""Most characters of a message of the library."""


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
    """Return a constraint as llguidance reads it.

    Raises:
        ValueError: It is not even JSON.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            (schema,) = constraint.texts
            return _json_grammar("{}" if schema.strip() == "true" else schema)
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar('{"type": "object"}')
        case ConstraintKind.REGEX:
            (expression,) = constraint.texts
            return LLMatcher.grammar_from_regex(expression)
        case ConstraintKind.GRAMMAR:
            (grammar,) = constraint.texts
            return LLMatcher.grammar_from_lark(grammar)
        case ConstraintKind.CHOICES:
            return LLMatcher.grammar_from_regex("|".join(map(_literal, constraint.texts)))


def _json_grammar(schema: str) -> str:
    """Return the grammar of a JSON Schema; what llguidance does not support is an error later."""
    return LLMatcher.grammar_from_json_schema(
        schema,
        defaults={"whitespace_pattern": WHITESPACE},
        overrides={"lenient": False, "coerce_one_of": False},
    )


def _literal(text: str) -> str:
    """Return a regular expression that matches a text alone."""
    return "".join("\\" + c if c in _SPECIAL else c for c in text)


def shorten(message: str) -> str:
    """Return a message of the library without what it says of its own state."""
    return message.partition("<state>")[0].strip()[:MAX_ERROR]


def embedded_schemas(grammar: str) -> list[object]:
    """Return the JSON Schemas that a Lark grammar holds after `%json`."""
    decoder, schemas, place = json.JSONDecoder(), list[object](), 0
    while (place := grammar.find("%json", place)) >= 0:
        place += len("%json")
        text = grammar[place:].lstrip()
        try:
            schemas.append(decoder.raw_decode(text)[0])
        except (ValueError, RecursionError):
            continue  # in a string or a comment, or refused when it is compiled
    return schemas
