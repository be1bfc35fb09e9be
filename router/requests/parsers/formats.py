"""The two things to know of a model family: how it calls tools, and how it reasons."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that an output may call.

    Attributes:
        name: Its name.
        schema: The JSON Schema of its arguments, an object.
        strict: Whether the arguments must be valid by the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    @property
    def allowed(self) -> Mapping[str, Any]:
        """The schema that calls are held to where they are constrained, but need not be strict."""
        return self.schema if self.strict else {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputContext:
    """What an output goes on with.

    Attributes:
        model: The model's template and markers.
        tail: The end of the prompt, with special tokens.
        continued: Whether the prompt ends within a message of the assistant's.
        tools: The tools that it may call.
        held: Names of those to whose schemas a grammar holds their calls.
    """

    model: ModelText
    tail: str = ""
    continued: bool = False
    tools: Sequence[OfferedTool] = field(default_factory=tuple)
    held: frozenset[str] = frozenset()

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool's arguments."""
        return {tool.name: tool.schema for tool in self.tools}


class ToolFormat(ABC):
    """How a family of models calls tools.

    Attributes:
        name: Its name on the command line.
        trigger: The marker that begins a call, or a section of calls.
        openers: Further markers that begin a call where an output is read.
        between: Text between calls, each of which has the marker; None: one section has them all.
    """

    name: ClassVar[str]
    trigger: ClassVar[str] = ""
    openers: ClassVar[tuple[str, ...]] = ()
    between: ClassVar[str | None] = None

    @abstractmethod
    def recognizes(self, model: ModelText) -> bool:
        """Return whether a model is of this family, by its chat template and its markers."""

    @abstractmethod
    def parser(self, context: OutputContext) -> Parser:
        """Return a parser of one output."""

    def starts(self, tools: Sequence[OfferedTool]) -> tuple[str, ...]:  # noqa: ARG002
        """Return the beginnings of `forced` outputs; empty: their parser needs none."""
        return (self.trigger,) if self.trigger else ()

    @property
    def constrained(self) -> "ToolFormat":
        """The form of calls where they are constrained."""
        return self

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls behind the trigger, with arguments valid by their schemas.

        Args:
            lark: The grammar to add rules to.
            tools: At least one.
            parallel: Whether there may be several calls, if `between` is None.

        Raises:
            NotImplementedError: The family has another form for constrained calls.
        """
        raise NotImplementedError

    def forced(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that must call tools."""
        call = self._call(lark, tools, parallel=parallel)
        if self.between is None or not parallel:
            return call
        return sequence(call, f"({sequence(lark.text(self.between), call)})*")

    def offered(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of an output that may call tools, with any text around the calls."""
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
    """How a family of models marks its reasoning.

    Attributes:
        name: Its name on the command line.
    """

    name: ClassVar[str]

    @abstractmethod
    def recognizes(self, model: ModelText) -> bool:
        """Return whether a model is of this family, by its chat template and its markers."""

    @abstractmethod
    def parser(self, context: OutputContext, then: Parser | None) -> Parser:
        """Return a parser of one output.

        Args:
            context: The prompt's end, with which the output goes on.
            then: Parser of calls in the answer; None: it has none.
        """

    @abstractmethod
    def lead(self, lark: Lark, context: OutputContext, limit: int | None) -> str:
        """Return the grammar of an output up to its answer; empty if the answer begins at once.

        Args:
            lark: The grammar to add rules to.
            context: The prompt's end, with which the output goes on.
            limit: Maximum tokens of reasoning; None: any number.

        Raises:
            ValueError: Reasoning cannot be bounded, as its end is no token; the message says so.
        """

    def answer(self, lark: Lark, context: OutputContext, form: str) -> str:  # noqa: ARG002
        """Return the grammar of an answer of a form, behind the lead."""
        return form

    def rest(self, lark: Lark, context: OutputContext) -> str:  # noqa: ARG002
        """Return the grammar of any answer behind the lead."""
        return f"{lark.tokens_but()}*"


def json_call(
    lark: Lark,
    tools: Sequence[OfferedTool],
    opening: str = "",
    closing: str = "",
    key: str = "arguments",
) -> str:
    """Return the grammar of a call that is a JSON object, with text around it."""
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
    """Return the grammar of a JSON object on a line of its own, and a closing marker."""
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
    """Return the grammar of a call that is a name and then a JSON object.

    Args:
        lark: The grammar to add rules to.
        tools: The tools.
        opening: Markers and texts in front of the arguments, with `{name}` for the name.
        closing: Markers behind them.
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
