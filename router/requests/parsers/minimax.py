"""MiniMax M2.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from collections.abc import Sequence
from functools import partial

from octavo.router.requests.parsers.formats import Context, Tool, ToolFormat, json_section
from octavo.router.requests.parsers.json_call import JsonOr
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.tagged_call import TaggedCall, Tags
from octavo.router.text.lark import Lark
from octavo.router.text.model_text import ModelText

OPENING, CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = '<invoke name="'
TAGS = Tags(
    name_end='">',
    key_open='<parameter name="',
    key_close='">',
    value_close="</parameter>",
    end="</invoke>",
    trim=True,
)


class MiniMax(ToolFormat):
    """Tags with the names of the tool and of its parameters."""

    name = "minimax"
    trigger = OPENING
    between = "\n"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has the marker."""
        return OPENING in model.template

    def parser(self, context: Context) -> Parser:
        """Return what reads one output."""
        call = partial(TaggedCall, TAGS, context.schemas)
        return MarkedCalls({INVOKE: call, OPENING: JsonOr}, (CLOSING,))

    def section(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:  # noqa: ARG002
        """Return what matches a call behind the marker: as JSON, which a schema constrains."""
        return json_section(lark, tools, CLOSING)
