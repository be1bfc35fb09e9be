"""DeepSeek V3, R1 and V3.1, whose markers have full-width bars and block characters.

V3 writes the type, the name and a JSON code block; V3.1 the name and plain JSON, between
`SEPARATOR` and `CALL_CLOSING`.
"""

from collections.abc import Sequence
from functools import partial

from octavo.router.requests.offered_tools import OfferedTool
from octavo.router.requests.parsers.formats import OutputPlan, ToolFormat, named_call
from octavo.router.requests.parsers.marked_calls import MarkedCalls
from octavo.router.requests.parsers.named_call import NamedCall
from octavo.router.requests.parsers.parser import Parser
from octavo.router.text.lark import Lark, sequence

OPENING, CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL_OPENING, CALL_CLOSING = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE = "```"


class DeepSeek(ToolFormat):
    """A section of calls, each with a name and a JSON object."""

    name = "deepseek"
    trigger = OPENING
    openers = (CALL_OPENING,)

    def parser(self, plan: OutputPlan) -> Parser:  # noqa: ARG002
        """Return a parser of one output."""
        call = partial(NamedCall, _name, (CALL_CLOSING, CLOSING))
        fenced = (f"\n{FENCE}{CALL_CLOSING}", f"{FENCE}{CALL_CLOSING}")
        return MarkedCalls({CALL_OPENING: call}, (*fenced, OPENING, CLOSING, CALL_CLOSING))

    def section(self, lark: Lark, tools: Sequence[OfferedTool], *, parallel: bool) -> str:
        """Return the grammar of calls after the marker."""
        if f"{FENCE}json" in lark.template:
            opening = [CALL_OPENING, "function", SEPARATOR, f"{{name}}\n{FENCE}json\n"]
            closing = [f"\n{FENCE}", CALL_CLOSING]
            between = lark.text("\n")
        else:
            opening, closing = [CALL_OPENING, "{name}", SEPARATOR], [CALL_CLOSING]
            between = ""
        call = lark.rule("calls", named_call(lark, tools, opening, closing))
        more = f"({sequence(between, call)})*" if parallel else ""
        return sequence(call, more, lark.marker(CLOSING))


def _name(header: str) -> str:
    before, _, behind = header.partition(SEPARATOR)
    return (behind.partition("\n")[0] if behind.strip() else before).strip()
