"""Models whose tokenizer has transformers' description of outputs, a `response_template`."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from octavo.router.requests.parsers.formats import OutputContext, ReasoningFormat, ToolFormat
from octavo.router.requests.parsers.hermes import Hermes
from octavo.router.requests.parsers.parser import Parser, Piece, PieceKind
from octavo.router.requests.parsers.think import Think
from octavo.router.text.lark import Lark
from octavo.router.text.model_text import ModelText

NAME = "response_template"
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
_ERRORS = (ValueError, TypeError, LookupError, RuntimeError, RecursionError)
"""What a template may fail with on an output that does not keep to it."""


class ResponseReader(Parser):
    """Reads an output by transformers' parser; calls are given when they are complete.

    Args:
        context: The prompt's end; its model has a `response_template`.
    """

    def __init__(self, context: OutputContext) -> None:
        assert context.model.response_template is not None
        tools: list[dict[str, Any] | Callable[..., Any]] = [
            {"function": {"name": name, "parameters": schema}}
            for name, schema in context.schemas.items()
        ]
        self._special = context.model.special
        template = context.model.response_template
        try:
            self._parser = ResponseParser(template, prefix=context.tail, tools=tools)
        except _ERRORS:  # a prompt may hold anything
            self._parser = ResponseParser(template, prefix="", tools=tools)
        self._space = ""  # at the end of a field, which is no part of it
        self._begun = False
        self._failed = False
        self._field = ""  # that has been opened last and not closed

    @property
    def reasons(self) -> bool:
        """Whether what came last is within reasoning."""
        return self._field in _REASONING

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that it must see: any of them may be in a template's patterns."""
        return self._special

    def feed(self, text: str) -> list[Piece]:
        """Take more text and return what is known of all that came."""
        if self._failed:
            return [Piece(PieceKind.CONTENT, text)] if text else []
        try:
            return list(self._pieces(self._parser.feed(text)))
        except _ERRORS:
            self._failed = True
            return []

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back: the output has ended."""
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
    """Calls as the template describes them."""

    name = NAME

    @property
    def constrained(self) -> ToolFormat:
        """The form of constrained calls: a template describes how to read, not how to write."""
        return Hermes()

    def recognizes(self, model: ModelText) -> bool:
        """Return whether there is a template."""
        return model.response_template is not None

    def parser(self, context: OutputContext) -> Parser:
        """Return a parser of one output."""
        return ResponseReader(context)


class ResponseTemplateReasoning(ReasoningFormat):
    """Reasoning as the template describes it."""

    name = NAME

    def recognizes(self, model: ModelText) -> bool:
        """Return whether there is a template."""
        return model.response_template is not None

    def parser(self, context: OutputContext, then: Parser | None) -> Parser:
        """Return a parser of one output, calls included if the template describes them."""
        if then is None or isinstance(then, ResponseReader):
            return ResponseReader(context)
        think = _think(context.model)
        return then if think is None else think.parser(context, then)

    def lead(self, lark: Lark, context: OutputContext, limit: int | None) -> str:
        """Return the grammar of reasoning, if the template has fixed markers of it."""
        think = _think(context.model)
        if think is not None:
            return think.lead(lark, context, limit)
        if limit is not None:
            raise ValueError("its response_template has no fixed markers of reasoning")
        return ""


def _think(model: ModelText) -> Think | None:
    """Return the markers of reasoning that a template has, if they are fixed."""
    fields = (model.response_template or {}).get("fields", {})
    for name in _REASONING:
        opening, closing = (fields.get(name, {}).get(key) for key in ("open", "close"))
        if isinstance(opening, str) and isinstance(closing, str):
            return Think(NAME, opening.strip(), closing.strip())
    return None


def _calls(value: Any) -> Iterable[Piece]:  # noqa: ANN401 - what a template makes
    """Return the pieces of the calls that a template has found."""
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if name := function.get("name"):
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield from (Piece(PieceKind.CALL, name), Piece(PieceKind.ARGUMENTS, text))
