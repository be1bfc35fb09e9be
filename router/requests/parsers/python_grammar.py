"""Grammars of Python-style calls under the tools' schemas."""

import re
from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.tool_schema import (
    ANNOTATIONS,
    Argument,
    Schema,
    arguments_of,
    refers_to_whole,
    with_definitions,
)
from octavo.router.text.lark import Lark, either, sequence

_NAME = re.compile(r"[^\W\d][\w-]*")
_WORDS = {"boolean": ("True", "False"), "null": ("None",)}


def python_list(lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
    """Return the grammar of a list of calls."""
    call = either(*(_call(lark, tool) for tool in tools))
    more = f"({lark.text(', ')} {call})*" if parallel else ""
    return sequence(lark.text("["), call, more, lark.text("]"))


def _call(lark: Lark, tool: OfferedTool) -> str:
    """Return the grammar of a call.

    If named arguments cannot express the schema, the arguments are a mapping: f(**{"a": 1}).
    """
    schema = tool.allowed
    arguments = arguments_of(schema)
    if (
        arguments is None
        or arguments.others is not None
        or refers_to_whole(schema)
        or not all(_NAME.fullmatch(one.name) for one in arguments.named)
    ):
        return lark.rule(
            "python", sequence(lark.text(f"{tool.name}(**"), lark.json(schema), lark.text(")"))
        )
    inner = _arguments(lark, arguments.named, schema)
    return lark.rule("python", sequence(lark.text(f"{tool.name}("), inner, lark.text(")")))


def _arguments(lark: Lark, arguments: Sequence[Argument], root: Schema) -> str:
    """Return the grammar of arguments in order, some of them optional."""
    comma, first, others = lark.text(", "), "", ""
    for one in reversed(arguments):
        written = lark.rule(
            "named",
            sequence(lark.text(f"{one.name}="), _value(lark, one.schema, root)),
        )
        alone = sequence(written, others)
        left_out = f"({alone} | {first})" if first else f"({alone})?"
        first = alone if one.required else left_out
        behind = sequence(comma, written)
        others = sequence(behind if one.required else f"({behind})?", others)
        first, others = (lark.rule("arguments", part) for part in (first, others))
    return first


def _value(lark: Lark, schema: Schema, root: Schema) -> str:
    """Return the grammar of a value: Python constants or JSON, which is mostly valid Python."""
    plain = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    types = plain.get("type")
    if set(plain) == {"type"} and isinstance(types, str) and types in _WORDS:
        return either(*map(lark.text, _WORDS[types]))
    if isinstance(types, list) and types and not {"enum", "const"} & set(plain):
        return either(*(_value(lark, {**plain, "type": one}, root) for one in types))
    if set(plain) == {"anyOf"} and isinstance(plain["anyOf"], list) and plain["anyOf"]:
        branches = [{} if one is True else one for one in plain["anyOf"]]
        if all(isinstance(one, dict) for one in branches):
            return either(*(_value(lark, one, root) for one in branches))
    return lark.json(with_definitions(plain, root))
