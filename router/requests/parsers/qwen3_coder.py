"""Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 and others: arguments between tags.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from octavo.router.requests.parsers.hermes import CLOSING, OPENING
from octavo.router.requests.parsers.tagged_call import Tags
from octavo.router.requests.parsers.tagged_format import TaggedFormat
from octavo.router.requests.parsers.tagged_grammar import CallLayout


class Qwen3Coder(TaggedFormat):
    """A function and its parameters, each in a tag with its name."""

    name = "qwen3_coder"
    trigger = OPENING
    closing = CLOSING
    begin = "<function="
    openers = (begin,)
    tags = Tags(
        name_end=">",
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        end="</function>",
        trim=True,
    )
    layout = CallLayout(
        call="\n<function={}>\n",
        text="<parameter={}>\n",
        close="\n</parameter>",
        between="\n",
        end="</function>\n",
    )
