"""Granite 3; Granite 4 uses the format of Hermes.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_list
from octavo.router.requests.parsers.json_call import JsonCalls
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark

OPENING, OTHER = "<|tool_call|>", "<tool_call>"


class Granite(ToolFormat):
    """A JSON list of calls after a marker."""

    name = "granite"
    trigger = OPENING
    openers = (OTHER,)

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({OPENING: JsonCalls, OTHER: JsonCalls})

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        return json_list(lark, tools, parallel=parallel)
