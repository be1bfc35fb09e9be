"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 and others: arguments between tags.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from collections.abc import Sequence
from functools import partial

from octavo.router.requests.parsers.formats import Context, Tool, ToolFormat, json_section
from octavo.router.requests.parsers.hermes import CLOSING, OPENING
from octavo.router.requests.parsers.json_call import JsonOr
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.tagged_call import TaggedCall, Tags
from octavo.router.text.lark import Lark
from octavo.router.text.model_text import ModelText

FUNCTION = "<function="
TAGS = Tags(
    name_end=">",
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    end="</function>",
    trim=True,
)


class Qwen3Coder(ToolFormat):
    """A function and its parameters, each in a tag with its name."""

    name = "qwen3_coder"
    trigger = OPENING
    between = "\n"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has such tags."""
        return FUNCTION in model.template and TAGS.key_open in model.template

    def parser(self, context: Context) -> Parser:
        """Return what reads one output."""
        call = partial(TaggedCall, TAGS, context.schemas)
        return MarkedCalls({FUNCTION: call, OPENING: JsonOr}, (CLOSING,))

    def section(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:  # noqa: ARG002
        """Return what matches a call behind the marker: as JSON, which a schema constrains."""
        return json_section(lark, tools, CLOSING)
