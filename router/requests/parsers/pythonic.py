"""Calls as Python writes them: Llama 4, LFM2, OLMo 3 and others.

[get_weather(city="Paris"), get_time(zone="CET")]
"""

from functools import partial

from octavo.router.requests.parsers.formats import Context, ToolFormat
from octavo.router.requests.parsers.hermes import Hermes
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.python_call import PythonCalls
from octavo.router.text.model_text import ModelText

MARKERS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}


class Pythonic(ToolFormat):
    """A list of calls with named arguments, perhaps between markers."""

    name = "pythonic"

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template or the vocabulary has a marker."""
        return model.mentions(*MARKERS)

    @property
    def constrained(self) -> ToolFormat:
        """The form of calls where they are constrained: a schema says nothing of Python."""
        return Hermes()

    def parser(self, context: Context) -> Parser:  # noqa: ARG002
        """Return what reads one output."""
        opens = dict.fromkeys(MARKERS, PythonCalls)
        bare = {"[": partial(PythonCalls, bare=True)}
        return MarkedCalls(opens, tuple(MARKERS.values()), bare)
