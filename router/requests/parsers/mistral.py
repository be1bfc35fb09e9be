"""Mistral.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_list, named_call
from octavo.router.requests.parsers.json_call import ByFirst, JsonCalls
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.named_call import NamedCall
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, sequence

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ToolFormat):
    """A JSON list of calls or, since tokenizer version 11, a name and a JSON object."""

    name = "mistral"
    trigger = OPENING

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({OPENING: _list_or_name}, (ARGUMENTS, CALL_ID))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        if lark.token(ARGUMENTS) is None:
            return json_list(lark, tools, parallel=parallel)
        call = lark.rule("calls", named_call(lark, tools, ["{name}", ARGUMENTS], []))
        return sequence(call, f"({lark.marker(OPENING)} {call})*") if parallel else call


def _list_or_name() -> ByFirst:
    return ByFirst(lambda first: JsonCalls() if first in "[{" else NamedCall(_name))


def _name(header: str) -> str:
    return header.partition("[")[0].strip()
