"""Reasoning between two markers: <think>...</think>, [THINK]...[/THINK] and others."""

from octavo.router.requests.parsers.formats import OutputPlan, ReasoningFormat
from octavo.router.requests.parsers.parser import Parser
from octavo.router.requests.parsers.thinking import Thinking
from octavo.router.text.lark import Lark, sequence
from octavo.router.text.model_text import ModelText


class Think(ReasoningFormat):
    """Reasoning before the answer, between two markers; the prompt may end with the first one.

    Args:
        name: Name of the format.
        opening: Marker that begins reasoning.
        closing: Marker that ends reasoning.
    """

    def __init__(self, name: str, opening: str, closing: str) -> None:
        self.name = name  # type: ignore[misc]
        self._opening = opening
        self._closing = closing

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the template or the vocabulary has the end marker."""
        return model.mentions(self._closing)

    def parser(self, plan: OutputPlan, then: Parser | None) -> Parser:
        """Return a parser of one output."""
        return Thinking(self._opening, self._closing, then, opened=self._opened(plan))

    def lead(self, lark: Lark, plan: OutputPlan, limit: int | None) -> str:
        """Return the grammar of reasoning, which is optional unless it has begun."""
        opened = self._opened(plan)
        if not opened and (self._closed(plan) or limit == 0):
            return ""
        word = lark.tokens_but(self._closing)
        if word is not None:
            count = "*" if limit is None else f"{{0,{limit}}}"
            reasoning = "" if limit == 0 else f"{word}{count}"
            reasoning = sequence(reasoning, lark.marker(self._closing))
        elif limit is None:
            reasoning = lark.until(self._closing)
        else:
            raise ValueError(f"{self._closing}, which ends the model's reasoning, is not a token")
        reasoning = sequence(reasoning, r'("\n\n" | "\n")?')
        return reasoning if opened else f"({sequence(lark.marker(self._opening), reasoning)})?"

    def rest(self, lark: Lark, plan: OutputPlan) -> str:
        """Return the grammar of any answer without more reasoning."""
        word = lark.tokens_but(self._opening)
        return super().rest(lark, plan) if word is None else f"{word}*"

    def _opened(self, plan: OutputPlan) -> bool:
        if plan.continued:
            return plan.tail.rfind(self._opening) > plan.tail.rfind(self._closing)
        return plan.tail.rstrip().endswith(self._opening)

    def _closed(self, plan: OutputPlan) -> bool:
        return plan.continued or plan.tail.rstrip().endswith(self._closing)
