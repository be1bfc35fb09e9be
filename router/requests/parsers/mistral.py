"""Mistral.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from collections.abc import Sequence

from octavo.router.requests.parsers.formats import (
    OfferedTool,
    OutputContext,
    ToolFormat,
    json_list,
    named_call,
)
from octavo.router.requests.parsers.json_call import JsonCalls
from octavo.router.requests.parsers.marked_calls import Call, MarkedCalls
from octavo.router.requests.parsers.named_call import NamedCall
from octavo.router.requests.parsers.parser import Parser, Piece
from octavo.router.text.lark import Lark, sequence

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ToolFormat):
    """A JSON list of calls or, since tokenizer version 11, a name and a JSON object."""

    name = "mistral"
    trigger = OPENING

    def parser(self, context: OutputContext) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({OPENING: _ListOrName}, (ARGUMENTS, CALL_ID))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        if lark.token(ARGUMENTS) is None:
            return json_list(lark, tools, parallel=parallel)
        call = lark.rule("calls", named_call(lark, tools, ["{name}", ARGUMENTS], []))
        return sequence(call, f"({lark.marker(OPENING)} {call})*") if parallel else call


class _ListOrName(Call):
    """A call whose first character shows its kind: list, object, or name."""

    def __init__(self) -> None:
        self._call: Call | None = None

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the calls once complete, else None."""
        if self._call is None:
            text = text.lstrip()
            if not text:
                return None
            self._call = JsonCalls() if text[0] in "[{" else NamedCall(_name)
        return self._call.feed(text, pieces)

    def flush(self, pieces: list[Piece]) -> None:
        """End incomplete calls."""
        if self._call is not None:
            self._call.flush(pieces)


def _name(header: str) -> str:
    return header.partition("[")[0].strip()
