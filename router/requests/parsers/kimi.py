"""Kimi K2.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
"""

import re
from collections.abc import Sequence
from functools import partial

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.named_call import NamedCall
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, either, sequence

OPENING, CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_NUMBER = re.compile(":[0-9]+$")
CALL_OPENING, CALL_CLOSING = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class Kimi(ToolFormat):
    """A section of calls, each with a numbered name and a JSON object."""

    name = "kimi"
    trigger = OPENING
    openers = (CALL_OPENING,)

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        call = partial(NamedCall, _name, (CALL_CLOSING, CLOSING))
        return MarkedCalls({CALL_OPENING: call}, (OPENING, CLOSING, CALL_CLOSING, ARGUMENTS))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        number = lark.rule("NUMBER", "/[0-9]{1,3}/")
        opening = lark.marker(CALL_OPENING)
        calls = [
            sequence(
                lark.text(f"functions.{tool.name}:"),
                number,
                lark.marker(ARGUMENTS),
                lark.json(tool.allowed),
            )
            for tool in tools
        ]
        call = lark.rule("call", sequence(opening, either(*calls), lark.marker(CALL_CLOSING)))
        return sequence(call, f"({call})*" if parallel else "", lark.marker(CLOSING))


def _name(header: str) -> str:
    called = header.partition(ARGUMENTS)[0].strip()
    return _NUMBER.sub("", called).removeprefix("functions.")
