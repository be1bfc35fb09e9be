"""Phi-4-mini.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_list
from octavo.router.requests.parsers.json_call import JsonCalls
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, sequence
from octavo.router.text.model_text import ModelText

OPENING, CLOSING = "<|tool_call|>", "<|/tool_call|>"
WORD = "functools"
"""Text that the model sometimes writes instead of the marker."""


class Phi4(ToolFormat):
    """A JSON list of calls between markers."""

    name = "phi4"
    trigger = OPENING
    openers = (f"{WORD}[",)

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model has both markers."""
        return model.mentions(OPENING) and model.mentions(CLOSING)

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({OPENING: JsonCalls, f"{WORD}[": _listed}, (CLOSING,))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        return sequence(json_list(lark, tools, parallel=parallel), lark.marker(CLOSING))


def _listed() -> JsonCalls:
    """Return the parser of a list that has begun."""
    calls = JsonCalls()
    calls.feed("[", [])
    return calls
