"""Python-style calls: Llama 4, LFM2 and others.

[get_weather(city="Paris"), get_time(zone="CET")]
"""

from collections.abc import Sequence
from functools import partial

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.python_call import PythonCalls
from octavo.router.requests.parsers.python_grammar import python_list
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText

LFM2 = "<|tool_call_start|>"
MARKERS = {"<|python_start|>": "<|python_end|>", LFM2: "<|tool_call_end|>"}


class Pythonic(ToolFormat):
    """A list of calls with named arguments, with or without markers."""

    name = "pythonic"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template or the vocabulary has a marker."""
        return model.mentions(*MARKERS)

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        opens = dict.fromkeys(MARKERS, PythonCalls)
        bare = {"[": partial(PythonCalls, bare=True)}
        return MarkedCalls(opens, tuple(MARKERS.values()), bare)

    def starts(self, tools: Sequence[OfferedTool]) -> tuple[str, ...]:
        """Return the prefixes of calls, as an answer may also be a list."""
        return LFM2, *(f"[{tool.name}(" for tool in tools)

    def forced(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that must call tools."""
        calls = python_list(lark, tools, parallel=parallel)
        if not _marks(lark):
            return calls
        return sequence(lark.marker(LFM2), calls, lark.marker(MARKERS[LFM2]))

    def offered(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls, perhaps after text, or of text without calls."""
        text = lark.without(*MARKERS, first="[")
        calls = self.forced(lark, tools, parallel=parallel)
        return sequence(f"({text})?", f"({calls})?") if _marks(lark) else either(calls, text)


def _marks(lark: Lark) -> bool:
    """Return whether a model writes markers, as LFM2 does; Llama 4 writes a bare list."""
    return LFM2 in lark.template or lark.token(LFM2) is not None
