"""The interfaces of a model family: its formats of tool calls and reasoning."""

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
        name: Name of the tool.
        schema: JSON Schema of the arguments, an object.
        strict: Whether the arguments must match the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    @property
    def allowed(self) -> Mapping[str, Any]:
        """The schema for constrained calls that need not be strict."""
        return self.schema if self.strict else {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputContext:
    """The context that an output continues.

    Attributes:
        model: The model's template and markers.
        tail: End of the prompt, with special tokens.
        continued: Whether the prompt ends inside an assistant's message.
        tools: Tools that the output may call.
        held: Names of the tools whose schemas a grammar enforces.
    """

    model: ModelText
    tail: str = ""
    continued: bool = False
    tools: Sequence[OfferedTool] = field(default_factory=tuple)
    held: frozenset[str] = frozenset()

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON Schema of each tool's arguments."""
        return {tool.name: tool.schema for tool in self.tools}


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
    def parser(self, context: OutputContext) -> Parser:
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
    def parser(self, context: OutputContext, then: Parser | None) -> Parser:
        """Return a parser of one output.

        Args:
            context: The context that the output continues.
            then: Parser of calls in the answer, if any.
        """

    @abstractmethod
    def lead(self, lark: Lark, context: OutputContext, limit: int | None) -> str:
        """Return the grammar of an output before its answer; empty if the answer begins at once.

        Args:
            lark: The grammar to add rules to.
            context: The context that the output continues.
            limit: Maximum tokens of reasoning; None: unlimited.

        Raises:
            ValueError: Reasoning cannot be bounded, as its end marker is not a token.
        """

    def answer(self, lark: Lark, context: OutputContext, form: str) -> str:  # noqa: ARG002
        """Return the grammar of the answer after the lead, given its constraint."""
        return form

    def rest(self, lark: Lark, context: OutputContext) -> str:  # noqa: ARG002
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
