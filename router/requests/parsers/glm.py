"""GLM 4.5 and later; 4.7 and later omit the line breaks.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from dataclasses import replace

from octavo.router.requests.parsers.hermes import CLOSING, OPENING
from octavo.router.requests.parsers.tagged_call import Tags
from octavo.router.requests.parsers.tagged_format import TaggedFormat
from octavo.router.requests.parsers.tagged_grammar import CallLayout
from octavo.router.text.lark import Lark

JOINED = "</arg_key><arg_value>"


class Glm(TaggedFormat):
    """A name, then alternating keys and values."""

    name = "glm"
    trigger = OPENING
    closing = CLOSING
    tags = Tags(
        name_end="",
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
        end=CLOSING,
        trim=False,
    )
    shown = (tags.key_open, tags.key_close, tags.value_open, tags.value_close)
    layout = CallLayout(
        call="{}\n",
        text="<arg_key>{}</arg_key>\n<arg_value>",
        close="</arg_value>",
        between="\n",
        end="",
    )

    def written(self, lark: Lark) -> CallLayout:
        """Return the layout of a model's calls."""
        if JOINED not in lark.template:
            return self.layout
        return replace(self.layout, call="{}", text=f"<arg_key>{{}}{JOINED}", between="")
