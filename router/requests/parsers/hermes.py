"""Hermes 2 and 3, Qwen 2.5 and 3, and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_section
from octavo.router.requests.parsers.json_call import JsonCall
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark
from octavo.router.text.model_text import ModelText

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """A JSON object between two markers."""

    name = "hermes"
    trigger = OPENING
    between = "\n"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has the marker, or does not mention tools.

        For templates without tools, a system message describes them in this format.
        """
        return OPENING in model.template or not model.has_tools

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({OPENING: JsonCall}, (CLOSING,))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:  # noqa: ARG002
        """Return the grammar of a call after the marker."""
        return json_section(lark, tools, CLOSING)
