"""GLM 4.5 and later.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
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

TAGS = Tags(
    name_end="",
    key_open="<arg_key>",
    key_close="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
    end=CLOSING,
    trim=False,
)


class Glm(ToolFormat):
    """A name, and keys and values in turn."""

    name = "glm"
    trigger = OPENING
    between = "\n"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has such tags."""
        return TAGS.key_open in model.template

    def parser(self, context: Context) -> Parser:
        """Return what reads one output."""
        call = partial(JsonOr, partial(TaggedCall, TAGS, context.schemas))
        ignored = (CLOSING, TAGS.key_open, TAGS.key_close, "<arg_value>", TAGS.value_close)
        return MarkedCalls({OPENING: call}, ignored)

    def section(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:  # noqa: ARG002
        """Return what matches a call behind the marker: as JSON, which a schema constrains."""
        return json_section(lark, tools, CLOSING)
