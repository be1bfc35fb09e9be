"""Common part of families whose calls are text between tags."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, json_section
from octavo.router.requests.parsers.json_call import json_or
from octavo.router.requests.parsers.marked_calls import Call, MarkedCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.tagged_call import TaggedCall, Tags
from octavo.router.requests.parsers.tagged_grammar import CallLayout, TaggedGrammar
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText


class TaggedFormat(ToolFormat):
    """A family whose calls are text between tags.

    Tools whose schema does not fit tags are called with a JSON object between the same markers. If
    `between` is None, a section has any number of calls with tags, or one JSON object.

    Attributes:
        closing: Marker that ends a section of calls.
        begin: Tag before a call's name; empty: the trigger begins a call.
        lead: Text between the trigger and the first call.
        shown: Special tokens inside tags.
        ignored: Other markers around calls, which some models write.
        tags: Tags for parsing.
        layout: Layout for generating.
    """

    between: ClassVar[str | None] = "\n"
    closing: ClassVar[str]
    begin: ClassVar[str] = ""
    lead: ClassVar[str] = ""
    shown: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    tags: ClassVar[Tags]
    layout: ClassVar[CallLayout]

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template has these tags."""
        return (
            self.begin or self.trigger
        ) in model.template and self.tags.key_open in model.template

    def parser(self, plan: OutputPlan) -> Parser:
        """Return a parser of one output."""
        call = partial(TaggedCall, self.tags, plan.schemas, plan.held)
        opens: dict[str, Callable[[], Call]] = {self.trigger: partial(json_or, call)}
        if self.begin:
            opens = {self.begin: call, self.trigger: json_or}
        return MarkedCalls(opens, (self.closing, *self.ignored), shown=self.shown)

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        grammar = TaggedGrammar(lark, self.tags, self.written(lark))
        tagged = {tool.name: grammar.call(tool) for tool in tools}
        others = [tool for tool in tools if tagged[tool.name] is None]
        forms = []
        if calls := list(filter(None, tagged.values())):
            call = either(*calls)
            many = f"({call})+" if self.between is None and parallel else call
            lead = lark.text(self.lead) if self.lead else ""
            forms.append(sequence(lead, many, lark.marker(self.closing)))
        if others:
            forms.append(json_section(lark, others, self.closing))
        return either(*forms)

    def written(self, lark: Lark) -> CallLayout:  # noqa: ARG002
        """Return the layout of a model's calls."""
        return self.layout
