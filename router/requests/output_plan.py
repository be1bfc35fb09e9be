"""Decides how to parse a request's outputs, and how to constrain them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo.common import rpc
from octavo.common.json_schema import Pointer
from octavo.common.limits import Limits, check_constraint
from octavo.router.requests.held_schemas import SchemaChecks, held_schemas
from octavo.router.requests.offered_tools import must_call, offered_tools
from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.answer_or_calls import AnswerOrCalls
from octavo.router.requests.parsers.formats import (
    OfferedTool,
    OutputContext,
    ReasoningFormat,
    ToolFormat,
)
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.response_template import NAME as RESPONSE_TEMPLATE
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText
from octavo.v1 import generation_pb2
from octavo.v1.sampling_pb2 import OutputConstraint

AUTO, NONE = "auto", "none"
F = TypeVar("F", ToolFormat, ReasoningFormat)
SURROGATE = re.compile("[\ud800-\udfff]")
"""One half of a UTF-16 surrogate pair: valid in JSON escapes, invalid in UTF-8."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How to parse and constrain a request's outputs.

    Attributes:
        context: The end of the prompt, which the outputs continue.
        tools: Format of tool calls; None: no calls.
        reasoning: Format of reasoning; None: no reasoning.
        answers: Whether outputs are either calls alone, or an answer under the client's constraint.
        constraint: Constraint on whole outputs, reasoning and calls included, if any.
        checks: Schemas to check at an output's end; None: the grammar enforces all.
        lark: Grammar that tells marker tokens from text; None: any spelling counts as a marker.
    """

    context: OutputContext
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    answers: bool = False
    lark: Lark | None = None
    constraint: OutputConstraint | None = None
    checks: SchemaChecks | None = None

    def parser(self) -> Parser | None:
        """Return a parser of one output; None if all text is content."""
        parser = None if self.tools is None else self.tools.parser(self.context)
        if parser is not None and self.tools is not None and self.answers:
            starts = self.tools.starts(self.context.tools)
            parser = AnswerOrCalls(starts, parser) if starts else parser
        if self.reasoning is not None:
            parser = self.reasoning.parser(self.context, parser)
        return parser

    def visible(self, parser: Parser) -> frozenset[int]:
        """Return ids of the special tokens that a parser must see."""
        return self.context.model.ids(parser.visible)

    def markers(self, parser: Parser) -> Mapping[int, str]:
        """Return the markers that count only as single tokens, by token id."""
        if self.lark is None:
            return {}
        parts = {part for marker in parser.visible for part in self.lark.parts(marker)}
        return {i: part for part in parts if (i := self.lark.token(part)) is not None}


class OutputFormats:
    """Chooses the parsers of each model's outputs.

    Args:
        tool_parser: Name in `TOOL_FORMATS`, "auto" or "none".
        reasoning_parser: Name in `REASONING_FORMATS`, "auto" or "none".
    """

    def __init__(self, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def tools(self, model: ModelText) -> ToolFormat | None:
        """Return the model's format of tool calls, if known."""
        if self._tool_parser != AUTO:
            return _readable(TOOL_FORMATS.get(self._tool_parser), model)
        return next((one for one in TOOL_FORMATS.values() if one.recognizes(model)), None)

    def reasoning(self, model: ModelText) -> ReasoningFormat | None:
        """Return the model's format of reasoning, if it has one."""
        if self._reasoning_parser != AUTO:
            return _readable(REASONING_FORMATS.get(self._reasoning_parser), model)
        return next((one for one in REASONING_FORMATS.values() if one.recognizes(model)), None)

    def check(self, chat: generation_pb2.ChatPrompt, model: ModelText) -> None:
        """Check that the router can parse calls of a chat's tools.

        Raises:
            rpc.RpcError: FAILED_PRECONDITION.
        """
        if not offered_tools(chat) or self.tools(model) is not None:
            return
        why = "the model has no response template"
        if self._tool_parser == NONE:
            why = "the router was started with --tool-parser none"
        elif self._tool_parser == AUTO:
            why = "the model's chat template does not say in which form it calls tools"
        raise rpc.precondition(
            "chat.tools",
            f"{why}; start the router with --tool-parser and one of {', '.join(TOOL_FORMATS)}",
        )

    def plan(
        self,
        message: generation_pb2.GenerateRequest,
        model: ModelText,
        tail: str,
        eos_token_ids: frozenset[int],
        limits: Limits,
    ) -> OutputPlan:
        """Return how to parse and constrain a valid request's outputs.

        Args:
            message: The request.
            model: The model's template and markers.
            tail: The end of the prompt, including special tokens.
            eos_token_ids: End-of-sequence tokens.
            limits: The model's limits, which also apply to constraints made here.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT or UNIMPLEMENTED if its outputs cannot be held to what
                it asks for.
        """
        schemas = held_schemas(message)
        constraint = message.constraint if message.HasField("constraint") else None
        if schemas.content is not None:
            constraint = _made(OutputConstraint(json_schema=json.dumps(schemas.content)), limits)
        elif constraint is not None and constraint.lenient:  # engines do not check these
            constraint = _made(OutputConstraint(json_schema=constraint.json_schema), limits)
        limit = message.stop.max_reasoning_tokens
        bounded = message.stop.HasField("max_reasoning_tokens")
        if message.WhichOneof("prompt") != "chat":
            if bounded:
                raise _unbounded("only outputs of chats have reasoning")
            return OutputPlan(OutputContext(model), constraint=constraint, checks=schemas.checks)
        chat = message.chat
        tools = offered_tools(chat)
        context = OutputContext(model, tail, chat.continue_final_message, tools)
        reasoning = self.reasoning(model)
        bounded = bounded and not (message.stop.fit_limits and reasoning is None)
        if bounded and reasoning is None:
            raise _unbounded(
                "the model does not mark reasoning, or the router has no parser for it"
            )
        form = self.tools(model) if tools else None
        lark, answers = Lark(model, eos_token_ids), constraint is not None
        whole = _OutputGrammar(
            chat, context, form, reasoning, lark, constraint=constraint, tools=schemas.tools
        )
        grammar = whole.make(limit if bounded else None, fit=message.stop.fit_limits)
        if grammar is not None:
            constraint = _made(OutputConstraint(grammar=grammar), limits)
            form = form and form.constrained
            context = replace(context, held=whole.held)
        return OutputPlan(
            context,
            form,
            reasoning,
            answers,
            None if constraint is None else lark,
            constraint,
            schemas.checks,
        )


def _made(constraint: OutputConstraint, limits: Limits) -> OutputConstraint:
    """Check a constraint that the router made instead of the client's, and return it.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if it is too large, UNIMPLEMENTED if no engine can use it.
    """
    check_constraint(constraint, limits)
    return constraint


def _readable(form: F | None, model: ModelText) -> F | None:
    """Return a format chosen by name; None if it needs a template that the model lacks."""
    needs_template = form is not None and form.name == RESPONSE_TEMPLATE
    return None if needs_template and model.response_template is None else form


class _OutputGrammar:
    """Builds the grammar of whole outputs: reasoning, calls, and the client's constraint.

    Attributes:
        held: Names of the tools whose schemas the grammar enforces.
    """

    def __init__(
        self,
        chat: generation_pb2.ChatPrompt,
        context: OutputContext,
        form: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        lark: Lark,
        *,
        constraint: OutputConstraint | None,
        tools: Sequence[OfferedTool],
    ) -> None:
        self._chat = chat
        self._constraint = constraint
        self._context = context
        self._tools = tools
        self._format = form and form.constrained
        self._reasoning = reasoning
        self._lark = lark
        self.held: frozenset[str] = frozenset()

    def make(self, limit: int | None, *, fit: bool = False) -> str | None:
        """Return the grammar; None if the client's own constraint, if any, suffices.

        Args:
            limit: Maximum tokens of reasoning; None: unlimited.
            fit: Whether to leave out a limit that cannot be enforced.
        """
        lark, lead = self._lark, ""
        body = self._calls()
        if body is None and limit is None and self._constraint is None:
            return None
        if self._reasoning is not None:
            try:
                lead = self._reasoning.lead(lark, self._context, limit)
            except ValueError as error:
                if limit is not None and fit:
                    return self.make(None)
                if limit is not None:
                    raise _unbounded(str(error)) from None
                field = "constraint" if body is None else "chat.tools"
                why = f"{field}: what follows reasoning cannot be constrained: {error}"
                raise rpc.invalid(field, why) from None
        if body is None and self._constraint is not None:
            form = _form(lark, self._constraint)
            answer = form
            if self._reasoning is not None:
                answer = self._reasoning.answer(lark, self._context, form)
            if not lead and answer == form and self._format is None:
                return None
            body = answer
            if self._format is not None:
                body = either(self._forced(), answer)
        if body is None:
            assert self._reasoning is not None, "a limit needs reasoning"
            body = self._reasoning.rest(lark, self._context)
        return lark.render(sequence(lead, body))

    @property
    def _parallel(self) -> bool:
        return self._chat.parallel_tool_calls or not self._chat.HasField("parallel_tool_calls")

    def _calls(self) -> str | None:
        """Return the grammar of an answer with calls; None if calls are unconstrained."""
        tools, form = self._tools, self._format
        if form is None:
            return None
        if must_call(self._chat):
            return self._forced()
        free = self._parallel and not any(tool.strict for tool in tools)
        if free or self._constraint is not None:
            return None
        self._hold()
        return form.offered(self._lark, tools, parallel=self._parallel)

    def _forced(self) -> str:
        assert self._format is not None
        self._hold()
        return self._format.forced(self._lark, self._tools, parallel=self._parallel)

    def _hold(self) -> None:
        self.held = frozenset(tool.name for tool in self._tools if tool.strict)


def _form(lark: Lark, constraint: OutputConstraint) -> str:
    """Return the grammar of an answer under the client's constraint."""
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return lark.document(read_schema("constraint.json_schema", constraint.json_schema))
        case "json_object":
            return lark.document({"type": "object"})
        case "regex":
            return lark.regex(constraint.regex)
        case "grammar":
            return lark.include(constraint.grammar)
    return either(*map(lark.text, constraint.choices.values))


def read_schema(field: str, text: str) -> Mapping[str, Any]:
    """Parse a JSON Schema.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT: it is no JSON object, or no text in UTF-8.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise rpc.invalid(field, f"{field} must be JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise rpc.invalid(field, f"{field} must be a JSON object")
    if (place := _unpaired(schema)) is not None:
        raise rpc.invalid(field, f"{field} has an unpaired surrogate at {place}")
    return schema


def _unpaired(schema: object) -> str | None:
    """Return the JSON Pointer of a text with an unpaired surrogate, or None."""
    left = [(Pointer("#"), schema)]
    while left:
        place, value = left.pop()
        match value:
            case str() if SURROGATE.search(value):
                return str(place)
            case list():
                left += [(Pointer(place, str(i)), one) for i, one in enumerate(value)]
            case dict():
                for name, one in value.items():
                    shown = SURROGATE.sub("\ufffd", name)
                    inner = Pointer(place, shown)
                    left += [(inner, name), (inner, one)]
    return None


def _unbounded(why: str) -> rpc.RpcError:
    field = "stop.max_reasoning_tokens"
    return rpc.invalid(field, f"{field} cannot be used: {why}")
