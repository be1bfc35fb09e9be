"""Models whose tokenizer has a `response_template`, transformers' description of outputs."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from octavo.router.requests.parsers.formats import OutputPlan, ReasoningFormat, ToolFormat
from octavo.router.requests.parsers.hermes import Hermes
from octavo.router.requests.parsers.parser import Parser, Piece, PieceKind
from octavo.router.requests.parsers.think import Think
from octavo.router.text.lark import Lark
from octavo.router.text.model_text import ModelText

NAME = "response_template"
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, RecursionError)
"""Errors that a template may raise on an output in another format."""


class ResponseReader(Parser):
    """Parse outputs with transformers' parser; emit calls when complete.

    Args:
        plan: The plan of the outputs; its model has a `response_template`.
    """

    def __init__(self, plan: OutputPlan) -> None:
        assert plan.model.response_template is not None
        tools: list[dict[str, Any] | Callable[..., Any]] = [
            {"function": {"name": name, "parameters": schema}}
            for name, schema in plan.schemas.items()
        ]
        self._special = plan.model.special
        template = plan.model.response_template
        try:
            self._parser = ResponseParser(template, prefix=plan.tail, tools=tools)
        except _ERRORS:  # a prompt may not match the template
            self._parser = ResponseParser(template, prefix="", tools=tools)
        self._space = ""  # spaces that end a field
        self._begun = False
        self._failed = False
        self._field = ""  # the last open one

    @property
    def reasons(self) -> bool:
        """Whether the last text is within reasoning."""
        return self._field in _REASONING

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that the parser must see: templates may match any of them."""
        return self._special

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""
        if self._failed:
            return [Piece(PieceKind.CONTENT, text)] if text else []
        try:
            return list(self._pieces(self._parser.feed(text)))
        except _ERRORS:
            self._failed = True
            return []

    def flush(self) -> list[Piece]:
        """Return the held pieces: the output has ended."""
        if self._failed:
            return []
        try:
            return list(self._pieces(self._parser.finalize()[1]))
        except _ERRORS:
            return []

    def _pieces(self, events: Iterable[Mapping[str, Any]]) -> Iterable[Piece]:
        for event in events:
            field = event["field"]
            self._field = "" if event["type"] == "region_close" else field
            if event["type"] == "region_open":
                self._begun, self._space = False, ""
            elif field == _CALLS:
                if event["type"] == "region_close":
                    yield from _calls(event["value"])
            elif event["type"] == "region_chunk":
                text = self._trimmed(event["text"])
                if text:
                    yield Piece(
                        PieceKind.REASONING if field in _REASONING else PieceKind.CONTENT, text
                    )

    def _trimmed(self, text: str) -> str:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown


class ResponseTemplateTools(ToolFormat):
    """Calls in the template's format."""

    name = NAME

    @property
    def constrained(self) -> ToolFormat:
        """The format for constrained calls: a template describes parsing, not writing."""
        return Hermes()

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model has a response template."""
        return model.response_template is not None

    def parser(self, plan: OutputPlan) -> Parser:
        """Return a parser of one output."""
        return ResponseReader(plan)


class ResponseTemplateReasoning(ReasoningFormat):
    """Reasoning in the template's format."""

    name = NAME

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model has a response template."""
        return model.response_template is not None

    def parser(self, plan: OutputPlan, then: Parser | None) -> Parser:
        """Return a parser of one output, including calls if the template describes them."""
        if then is None or isinstance(then, ResponseReader):
            return ResponseReader(plan)
        think = _think(plan.model)
        return then if think is None else think.parser(plan, then)

    def lead(self, lark: Lark, plan: OutputPlan, limit: int | None) -> str:
        """Return the grammar of reasoning, if the template has fixed markers for it."""
        think = _think(plan.model)
        if think is not None:
            return think.lead(lark, plan, limit)
        if limit is not None:
            raise ValueError("its response_template has no fixed markers of reasoning")
        return ""


def _think(model: ModelText) -> Think | None:
    """Return the template's markers of reasoning, if they are fixed."""
    fields = (model.response_template or {}).get("fields", {})
    for name in _REASONING:
        opening, closing = (fields.get(name, {}).get(key) for key in ("open", "close"))
        if isinstance(opening, str) and isinstance(closing, str):
            return Think(NAME, opening.strip(), closing.strip())
    return None


def _calls(value: Any) -> Iterable[Piece]:  # noqa: ANN401 - what a template makes
    """Return the pieces of calls that a template has parsed."""
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if name := function.get("name"):
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield from (Piece(PieceKind.CALL, name), Piece(PieceKind.ARGUMENTS, text))
