"""DeepSeek V3.2, whose tags mark string values.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""  # noqa: RUF002

from octavo.router.requests.parsers.tagged_call import Tags
from octavo.router.requests.parsers.tagged_format import TaggedFormat
from octavo.router.requests.parsers.tagged_grammar import CallLayout
from octavo.router.text.model_text import ModelText

DSML = "｜DSML｜"  # noqa: RUF001


class Dsml(TaggedFormat):
    """Tags with the names of the tool and its parameters, and whether a value is a string."""

    name = "dsml"
    trigger = f"<{DSML}function_calls>"
    closing = f"</{DSML}function_calls>"
    begin = f'<{DSML}invoke name="'
    openers = (begin,)
    lead = "\n"
    ignored = (f"<{DSML}tool_calls>", f"</{DSML}tool_calls>")  # since V4
    between = None
    tags = Tags(
        name_end='">',
        key_open=f'<{DSML}parameter name="',
        key_close='"',
        value_open=">",
        value_close=f"</{DSML}parameter>",
        end=f"</{DSML}invoke>",
        trim=False,
        attributes=('string="true"', 'string="false"'),
    )
    layout = CallLayout(
        call=f'<{DSML}invoke name="{{}}">\n',
        text=f'<{DSML}parameter name="{{}}" string="true">',
        json=f'<{DSML}parameter name="{{}}" string="false">',
        close=f"</{DSML}parameter>",
        between="\n",
        end=f"</{DSML}invoke>\n",
    )

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the token exists: these models have no chat template."""
        return model.mentions(DSML)
