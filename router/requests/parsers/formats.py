"""The plan of a request's outputs, and a model family's formats of tool calls and reasoning."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.router.requests.held_schemas import HeldSchemas
from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.answer_or_calls import AnswerOrCalls
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText
from octavo.v1.sampling_pb2 import OutputConstraint


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How to parse and constrain a request's outputs.

    Attributes:
        model: The model's template and markers.
        tail: End of the prompt, which the outputs continue, with special tokens.
        continued: Whether the prompt ends inside an assistant's message.
        tools: Tools that the outputs may call.
        held: Names of the tools whose schemas a grammar enforces.
        calls: Format of tool calls; None: no calls.
        reasoning: Format of reasoning; None: no reasoning.
        answers: Whether outputs are either calls alone, or an answer under the client's constraint.
        lark: Grammar that tells marker tokens from text; None: any spelling counts as a marker.
        constraint: Constraint on whole outputs, reasoning and calls included, if any.
        checks: Schemas to check at an output's end; None: the grammar enforces all.
    """

    model: ModelText
    tail: str = ""
    continued: bool = False
    tools: Sequence[OfferedTool] = ()
    held: frozenset[str] = frozenset()
    calls: "ToolFormat | None" = None
    reasoning: "ReasoningFormat | None" = None
    answers: bool = False
    lark: Lark | None = None
    constraint: OutputConstraint | None = None
    checks: HeldSchemas | None = None

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON Schema of each tool's arguments."""
        return {tool.name: tool.schema for tool in self.tools}

    def parser(self) -> Parser | None:
        """Return a parser of one output; None if all text is content."""
        parser = None if self.calls is None else self.calls.parser(self)
        if parser is not None and self.calls is not None and self.answers:
            starts = self.calls.starts(self.tools)
            parser = AnswerOrCalls(starts, parser) if starts else parser
        if self.reasoning is not None:
            parser = self.reasoning.parser(self, parser)
        return parser

    def visible(self, parser: Parser) -> frozenset[int]:
        """Return ids of the special tokens that a parser must see."""
        return self.model.ids(parser.visible)

    def markers(self, parser: Parser) -> Mapping[int, str]:
        """Return the markers that count only as single tokens, by token id."""
        if self.lark is None:
            return {}
        parts = {part for marker in parser.visible for part in self.lark.parts(marker)}
        return {i: part for part in parts if (i := self.lark.token(part)) is not None}


class ToolFormat(ABC):
    """How a model family calls tools.

    Attributes:
        name: Name on the command line.
        trigger: The marker that begins a call, or a section of calls.
        openers: Other markers that may begin a call when parsing.
        between: Text between calls that each have the marker; None: one section holds all calls.
    """

    name: ClassVar[str]
    trigger: ClassVar[str] = ""
    openers: ClassVar[tuple[str, ...]] = ()
    between: ClassVar[str | None] = None

    def recognizes(self, model: ModelText) -> bool:
        """Return whether a model belongs to the family: by default, its template has the marker."""
        return self.trigger in model.template

    @abstractmethod
    def parser(self, plan: OutputPlan) -> Parser:
        """Return a parser of one output."""

    def starts(self, tools: Sequence[OfferedTool]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the prefixes of `forced` outputs; empty if not needed for parsing."""
        return (self.trigger,) if self.trigger else ()

    @property
    def constrained(self) -> "ToolFormat":
        """The format for constrained calls."""
        return self

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the trigger, with valid arguments.

        Args:
            lark: The grammar to add rules to.
            tools: Tools, at least one.
            parallel: Whether several calls are allowed, if `between` is None.

        Raises:
            NotImplementedError: The family uses another format for constrained calls.
        """
        raise NotImplementedError

    def forced(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that must call tools."""
        call = self._call(lark, tools, parallel=parallel)
        if self.between is None or not parallel:
            return call
        return sequence(call, f"({sequence(lark.text(self.between), call)})*")

    def offered(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that may call tools, with text around the calls."""
        section = self.section(lark, tools, parallel=parallel)
        call = sequence(lark.until(self.trigger, *self.openers), section)
        rest = lark.without(self.trigger, *self.openers)
        if self.between is None or not parallel:
            return either(call, rest)
        return sequence(f"({call})*", rest)

    def _call(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        section = self.section(lark, tools, parallel=parallel)
        return lark.rule("call", sequence(lark.marker(self.trigger), section))


class ReasoningFormat(ABC):
    """How a model family marks reasoning.

    Attributes:
        name: Name on the command line.
    """

    name: ClassVar[str]

    @abstractmethod
    def recognizes(self, model: ModelText) -> bool:
        """Return whether a model belongs to the family, by its chat template and markers."""

    @abstractmethod
    def parser(self, plan: OutputPlan, then: Parser | None) -> Parser:
        """Return a parser of one output.

        Args:
            plan: The plan of the outputs.
            then: Parser of calls in the answer, if any.
        """

    @abstractmethod
    def lead(self, lark: Lark, plan: OutputPlan, limit: int | None) -> str:
        """Return the grammar of an output before its answer; empty if the answer begins at once.

        Args:
            lark: The grammar to add rules to.
            plan: The plan of the outputs.
            limit: Maximum tokens of reasoning; None: unlimited.

        Raises:
            ValueError: Reasoning cannot be bounded, as its end marker is not a token.
        """

    def answer(self, lark: Lark, plan: OutputPlan, form: str) -> str:  # noqa: ARG002
        """Return the grammar of the answer after the lead, given its constraint."""
        return form

    def rest(self, lark: Lark, plan: OutputPlan) -> str:  # noqa: ARG002
        """Return the grammar of an unconstrained answer after the lead."""
        return f"{lark.tokens_but()}*"


def json_call(
    lark: Lark,
    tools: Sequence[OfferedTool],
    opening: str = "",
    closing: str = "",
    key: str = "arguments",
) -> str:
    """Return the grammar of a JSON object with text around it."""
    return either(
        *(
            lark.rule(
                "object",
                sequence(
                    lark.text(f'{opening}{{"name": "{tool.name}", "{key}": '),
                    lark.json(tool.allowed),
                    lark.text(f"}}{closing}"),
                ),
            )
            for tool in tools
        )
    )


def json_section(lark: Lark, tools: Sequence[OfferedTool], closing: str) -> str:
    """Return the grammar of a JSON object on its own line, and a closing marker."""
    newline = lark.text("\n")
    return sequence(newline, json_call(lark, tools), newline, lark.marker(closing))


def json_list(lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
    """Return the grammar of a JSON list of calls."""
    call = json_call(lark, tools)
    more = f"({sequence(lark.text(', '), call)})*" if parallel else ""
    return sequence(lark.text("["), call, more, lark.text("]"))


def named_call(
    lark: Lark, tools: Sequence[OfferedTool], opening: Sequence[str], closing: Sequence[str]
) -> str:
    """Return the grammar of a call: a name and then a JSON object.

    Args:
        lark: The grammar to add rules to.
        tools: The tools.
        opening: Markers and texts before the arguments, with `{name}` for the name.
        closing: Markers after the arguments.
    """
    return either(
        *(
            lark.rule(
                "named",
                sequence(
                    *(lark.marker(part.replace("{name}", tool.name)) for part in opening),
                    lark.json(tool.allowed),
                    *map(lark.marker, closing),
                ),
            )
            for tool in tools
        )
    )
