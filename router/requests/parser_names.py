"""The names of the output parsers, for settings.

They are separate from the parsers, whose imports would slow the start of commands.
"""

from typing import TYPE_CHECKING, Literal

TOOL_FORMAT_NAMES = (
    "response_template",
    "gpt_oss",
    "dsml",
    "deepseek",
    "kimi",
    "minimax",
    "seed_oss",
    "glm",
    "qwen3_coder",
    "mistral",
    "phi4",
    "granite",
    "tool_calls",
    "nemotron",
    "longcat",
    "internlm",
    "pythonic",
    "llama3",
    "hermes",
)
"""Names of `TOOL_FORMATS` in `parsers`, in the same order."""
REASONING_FORMAT_NAMES = ("response_template", "gpt_oss", "think", "mistral", "seed")
"""Names of `REASONING_FORMATS` in `parsers`, in the same order."""

if TYPE_CHECKING:  # mypy cannot read a computed Literal
    ToolParserName = str
    ReasoningParserName = str
else:
    ToolParserName = Literal["auto", *TOOL_FORMAT_NAMES, "none"]
    ReasoningParserName = Literal["auto", *REASONING_FORMAT_NAMES, "none"]
