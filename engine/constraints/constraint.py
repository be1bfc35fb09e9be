"""The constraint of a request's outputs."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """The kinds of octavo.v1.OutputConstraint, by field name, and vLLM's."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices"
    EBNF = "ebnf"
    """A grammar as vLLM takes it: GBNF, llama.cpp's notation, or Lark's."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The required form of a request's outputs; equal constraints share a compiled grammar.

    Attributes:
        kind: Its notation.
        texts: The schema, the expression or the grammar alone, or the choices; empty for any
            JSON object.
    """

    kind: ConstraintKind
    texts: tuple[str, ...] = ()


class ConstraintError(Exception):
    """A constraint cannot be served; the message says what is wrong, and where."""
