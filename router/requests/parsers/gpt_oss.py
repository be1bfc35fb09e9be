"""gpt-oss: reasoning, answers and calls are messages in channels.

`openai-harmony` is not used: it downloads a vocabulary, and supports only that one.
"""

from collections.abc import Sequence

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.channels import (
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    Channels,
)
from octavo.router.requests.parsers.formats import (
    OutputPlan,
    ReasoningFormat,
    ToolFormat,
    named_call,
)
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, either, sequence
from octavo.router.text.model_text import ModelText

NAME = "gpt_oss"


def _parser(plan: OutputPlan) -> Parser:
    return Channels(_begun(plan))


def _begun(plan: OutputPlan) -> str:
    """Return the prompt's part of the message that the output continues."""
    return plan.tail.rpartition(START)[2] if START in plan.tail else "assistant"


class GptOssTools(ToolFormat):
    """Tool calls as messages to a function."""

    name = NAME

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model uses channels."""
        return model.mentions(CHANNEL) and model.mentions(MESSAGE)

    def parser(self, plan: OutputPlan) -> Parser:
        """Return a parser of one output."""
        return _parser(plan)

    def forced(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:  # noqa: ARG002
        """Return the grammar of a call; an output has only one."""
        opening = [CHANNEL, "commentary to=functions.{name} ", CONSTRAIN, "json", MESSAGE]
        return named_call(lark, tools, opening, [])

    def offered(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of a call, or a message in the final channel."""
        call = self.forced(lark, tools, parallel=parallel)
        return either(call, sequence(_final(lark), lark.without(*Channels.markers)))


class GptOssReasoning(ReasoningFormat):
    """Reasoning as messages in the analysis channel."""

    name = NAME

    def recognizes(self, model: ModelText) -> bool:
        """Return whether the model uses channels."""
        return model.mentions(CHANNEL) and model.mentions(MESSAGE)

    def parser(self, plan: OutputPlan, then: Parser | None) -> Parser:  # noqa: ARG002
        """Return a parser of one output, including calls."""
        return _parser(plan)

    def lead(self, lark: Lark, plan: OutputPlan, limit: int | None) -> str:
        """Return the grammar of an output up to the header of its answer."""
        if MESSAGE in _begun(plan):
            return ""
        if lark.token(END) is None or lark.token(CHANNEL) is None:
            raise ValueError("the vocabulary has no tokens for channels")
        # Each of these ends the message.
        known = [marker for marker in Channels.markers if lark.token(marker) is not None]
        word = lark.tokens_but(*known)
        analysis = sequence(lark.marker(CHANNEL), lark.text("analysis"), lark.marker(MESSAGE))
        turn = sequence(lark.marker(END), lark.marker(START), lark.text("assistant"))
        if limit is None:
            return f"({sequence(analysis, f'{word}*', turn)})*"
        return f"({sequence(analysis, f'{word}{{0,{limit}}}', turn)})?" if limit else ""

    def answer(self, lark: Lark, plan: OutputPlan, form: str) -> str:
        """Return the grammar of a final message under a constraint."""
        return form if MESSAGE in _begun(plan) else sequence(_final(lark), form)

    def rest(self, lark: Lark, plan: OutputPlan) -> str:
        """Return the grammar of messages in channels other than analysis."""
        if MESSAGE in _begun(plan):
            return super().rest(lark, plan)
        channel = f'{lark.marker(CHANNEL)} ("final" | "commentary")'
        return f"({channel} {lark.tokens_but(CHANNEL)}*)+"


def _final(lark: Lark) -> str:
    return sequence(lark.marker(CHANNEL), lark.text("final"), lark.marker(MESSAGE))
