"""Families whose calls are a JSON object or list between two markers.

Hunyuan, Jamba:  <tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
Nemotron 2:      <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>
LongCat:         <longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>
InternLM:        <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_call, json_list
from octavo.router.requests.parsers.json_call import JsonCalls
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, sequence


class JsonBetween(ToolFormat):
    """JSON between two markers.

    Args:
        name: Name of the format.
        opening: Marker before the JSON.
        closing: Marker after the JSON.
        listed: Whether the JSON is a list.
        space: Text between the markers and the JSON.
        key: Key of the arguments.
    """

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str,
        *,
        listed: bool = True,
        space: str = "",
        key: str = "arguments",
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.trigger = opening  # type: ignore[misc]
        self.between = None if listed else "\n"  # type: ignore[misc]
        self._closing = closing
        self._listed = listed
        self._space = space
        self._key = key

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        return MarkedCalls({self.trigger: JsonCalls}, (self._closing,))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        calls = (
            json_list(lark, tools, parallel=parallel)
            if self._listed
            else json_call(lark, tools, key=self._key)
        )
        space = lark.text(self._space) if self._space else ""
        return sequence(space, calls, space, lark.marker(self._closing))
