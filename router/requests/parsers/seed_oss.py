"""Seed-OSS.

<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
</function>
</seed:tool_call>
"""

from dataclasses import replace

from octavo.router.requests.parsers.qwen3_coder import Qwen3Coder
from octavo.router.text.model_text import ModelText


class SeedOss(Qwen3Coder):
    """Qwen3-Coder's tags between other markers, without line breaks around values."""

    name = "seed_oss"
    trigger = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    layout = replace(Qwen3Coder.layout, text="<parameter={}>", close="</parameter>")

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model has the marker."""
        return model.mentions(self.trigger)
