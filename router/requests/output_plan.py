"""Decides how to parse a request's outputs, and how to constrain them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from octavo.common import rpc
from octavo.common.json_schema import Pointer
from octavo.common.limits import Limits, check_constraint
from octavo.router.requests.held_schemas import held_schemas
from octavo.router.requests.offered_tools import OfferedTool, must_call, offered_tools
from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.formats import OutputPlan, ReasoningFormat, ToolFormat
from octavo.router.requests.parsers.response_template import NAME as RESPONSE_TEMPLATE
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText
from octavo.v1 import generation_pb2
from octavo.v1.sampling_pb2 import OutputConstraint

AUTO, NONE = "auto", "none"
F = TypeVar("F", ToolFormat, ReasoningFormat)
SURROGATE = re.compile("[\ud800-\udfff]")
"""One half of a UTF-16 surrogate pair: valid in JSON escapes, invalid in UTF-8."""


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
        plan = OutputPlan(model, constraint=constraint, checks=schemas.checks)
        if message.WhichOneof("prompt") != "chat":
            if bounded:
                raise _unbounded("only outputs of chats have reasoning")
            return plan
        chat, fit = message.chat, message.stop.fit_limits
        tools, reasoning = offered_tools(chat), self.reasoning(model)
        bounded = bounded and not (fit and reasoning is None)
        if bounded and reasoning is None:
            raise _unbounded(
                "the model does not mark reasoning, or the router has no parser for it"
            )
        lark = Lark(model, eos_token_ids)
        plan = replace(
            plan,
            tail=tail,
            continued=chat.continue_final_message,
            tools=tools,
            calls=self.tools(model) if tools else None,
            reasoning=reasoning,
            answers=constraint is not None,
            lark=None if constraint is None else lark,
        )
        grammar = _grammar(lark, plan, chat, schemas.tools, limit if bounded else None, fit=fit)
        if grammar is None:
            return plan
        calls = plan.calls and plan.calls.constrained
        return replace(
            plan,
            calls=calls,
            held=frozenset(tool.name for tool in schemas.tools if calls and tool.strict),
            lark=lark,
            constraint=_made(OutputConstraint(grammar=grammar), limits),
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


def _grammar(
    lark: Lark,
    plan: OutputPlan,
    chat: generation_pb2.ChatPrompt,
    tools: Sequence[OfferedTool],
    limit: int | None,
    *,
    fit: bool,
) -> str | None:
    """Return the grammar of whole outputs: reasoning, calls, and the client's constraint.

    Args:
        lark: The grammar to add rules to.
        plan: The plan, with the client's constraint.
        chat: The chat.
        tools: The tools that outputs may call, with schemas that a grammar can enforce.
        limit: Maximum tokens of reasoning; None: unlimited.
        fit: Whether to leave out a limit that cannot be enforced.

    Returns:
        The grammar; None if the client's own constraint, if any, suffices.
    """
    calls = plan.calls and plan.calls.constrained
    several = chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")
    constraint, reasoning, lead = plan.constraint, plan.reasoning, ""
    free = several and not any(tool.strict for tool in tools)
    body: str | None = None
    if calls is not None and must_call(chat):
        body = calls.forced(lark, tools, parallel=several)
    elif calls is not None and constraint is None and not free:
        body = calls.offered(lark, tools, parallel=several)
    if body is None and limit is None and constraint is None:
        return None
    if reasoning is not None:
        try:
            lead = reasoning.lead(lark, plan, limit)
        except ValueError as error:
            if limit is not None and fit:
                return _grammar(lark, plan, chat, tools, None, fit=fit)
            if limit is not None:
                raise _unbounded(str(error)) from None
            field = "constraint" if body is None else "chat.tools"
            why = f"{field}: what follows reasoning cannot be constrained: {error}"
            raise rpc.invalid(field, why) from None
    if body is None and constraint is not None:
        form = _form(lark, constraint)
        body = form if reasoning is None else reasoning.answer(lark, plan, form)
        if not lead and body == form and calls is None:
            return None
        if calls is not None:
            body = either(calls.forced(lark, tools, parallel=several), body)
    if body is None:
        assert reasoning is not None, "a limit needs reasoning"
        body = reasoning.rest(lark, plan)
    return lark.render(sequence(lead, body))


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
