"""MiniMax M2.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from octavo.router.requests.parsers.tagged_call import Tags
from octavo.router.requests.parsers.tagged_format import TaggedFormat
from octavo.router.requests.parsers.tagged_grammar import CallLayout
from octavo.router.text.model_text import ModelText


class MiniMax(TaggedFormat):
    """Tags with the names of the tool and its parameters."""

    name = "minimax"
    trigger = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    begin = '<invoke name="'
    openers = (begin,)
    lead = "\n"
    tags = Tags(
        name_end='">',
        key_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
        end="</invoke>",
        trim=True,
    )
    layout = CallLayout(
        call='<invoke name="{}">\n',
        text='<parameter name="{}">',
        close="</parameter>",
        between="\n",
        end="</invoke>\n",
    )
    between = None

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has the marker."""
        return self.trigger in model.template
