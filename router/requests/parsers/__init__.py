"""Output parsers: they split outputs into content, reasoning and tool calls.

To add a model family, write a file here, and add it to `TOOL_FORMATS` or `REASONING_FORMATS` and to
`../parser_names.py`.
"""

from octavo.router.requests.parser_names import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES
from octavo.router.requests.parsers.deepseek import DeepSeek
from octavo.router.requests.parsers.dsml import Dsml
from octavo.router.requests.parsers.formats import ReasoningFormat, ToolFormat
from octavo.router.requests.parsers.glm import Glm
from octavo.router.requests.parsers.gpt_oss import GptOssReasoning, GptOssTools
from octavo.router.requests.parsers.granite import Granite
from octavo.router.requests.parsers.hermes import Hermes
from octavo.router.requests.parsers.json_between import JsonBetween
from octavo.router.requests.parsers.kimi import Kimi
from octavo.router.requests.parsers.llama3 import Llama3
from octavo.router.requests.parsers.minimax import MiniMax
from octavo.router.requests.parsers.mistral import Mistral
from octavo.router.requests.parsers.phi4 import Phi4
from octavo.router.requests.parsers.pythonic import Pythonic
from octavo.router.requests.parsers.qwen3_coder import Qwen3Coder
from octavo.router.requests.parsers.response_template import (
    ResponseTemplateReasoning,
    ResponseTemplateTools,
)
from octavo.router.requests.parsers.seed_oss import SeedOss
from octavo.router.requests.parsers.think import Think

TOOL_FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        ResponseTemplateTools(),
        GptOssTools(),
        Dsml(),
        DeepSeek(),
        Kimi(),
        MiniMax(),
        SeedOss(),
        Glm(),
        Qwen3Coder(),
        Mistral(),
        Phi4(),
        Granite(),
        JsonBetween("tool_calls", "<tool_calls>", "</tool_calls>"),
        JsonBetween("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
        JsonBetween(
            "longcat", "<longcat_tool_call>", "</longcat_tool_call>", listed=False, space="\n"
        ),
        JsonBetween(
            "internlm",
            "<|action_start|><|plugin|>",
            "<|action_end|>",
            listed=False,
            space="\n",
            key="parameters",
        ),
        Pythonic(),
        Llama3(),
        Hermes(),
    )
}
"""Formats of tool calls by name, tried in this order: the most specific first."""

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    one.name: one
    for one in (
        ResponseTemplateReasoning(),
        GptOssReasoning(),
        Think("think", "<think>", "</think>"),
        Think("mistral", "[THINK]", "[/THINK]"),
        Think("seed", "<seed:think>", "</seed:think>"),
    )
}
"""Formats of reasoning by name."""

assert tuple(TOOL_FORMATS) == TOOL_FORMAT_NAMES
assert tuple(REASONING_FORMATS) == REASONING_FORMAT_NAMES
