"""Llama 3.1 to 3.3.

{"name": "get_weather", "parameters": {"city": "Paris"}}
"""

from collections.abc import Sequence
from functools import partial

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_call
from octavo.router.requests.parsers.json_call import JsonCalls
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3(ToolFormat):
    """An output of one JSON object, perhaps after a marker, or of several with semicolons."""

    name = "llama3"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template asks for JSON objects."""
        return PYTHON_TAG in model.template or '"parameters": dictionary' in model.template

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        calls = partial(JsonCalls, SEPARATOR)
        return MarkedCalls({PYTHON_TAG: calls}, bare={"{": partial(calls, bare=True)})

    def starts(self, tools: Sequence[OfferedTool]) -> tuple[str, ...]:
        """Return the prefixes of calls, as an answer may also be an object with a name."""
        return tuple(f'{{"name": "{tool.name}", "parameters": ' for tool in tools)

    def forced(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that must call tools."""
        call = json_call(lark, tools, key="parameters")
        return sequence(call, f"({lark.text(f'{SEPARATOR} ')} {call})*") if parallel else call

    def offered(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls, or of text that does not begin like a call."""
        calls = self.forced(lark, tools, parallel=parallel)
        return either(calls, lark.without(PYTHON_TAG, first="{"))
