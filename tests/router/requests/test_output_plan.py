"""What outputs are held to: any that the grammar allows is read as valid calls of its tools."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from octavo.common.rpc import RpcError
from octavo.router.requests.output_plan import OutputFormats
from octavo.router.requests.parsers import TOOL_FORMATS
from octavo.router.requests.parsers.parser import Kind
from octavo.router.text.lark import rename
from octavo.router.text.model_text import ModelText, model_text
from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode
from tests.router.conftest import byte_level_tokenizer
from tests.router.requests.parsers.outputs import EXAMPLES, GEMMA, SCHEMAS

EOS = 256
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
    "llama3": ["<|python_tag|>"],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "deepseek": [
        *(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "calls\u2581end")),
        *(
            f"<\uff5ctool\u2581{name}\uff5c>"
            for name in ("call\u2581begin", "call\u2581end", "sep")
        ),
        *("<think>", "</think>"),
    ],
    "kimi": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "phi4": ["<|tool_call|>", "<|/tool_call|>"],
    "granite": ["<|tool_call|>"],
    "gpt_oss": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"],
    "response_template": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"],
}
REASONING = {"mistral": "mistral", "gpt_oss": "gpt_oss", "response_template": "response_template"}
TOOL = {
    "name": "get_weather",
    "parameters": json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
        }
    ),
}
NOW = {"name": "now"}
CHECKED = {"get_weather": json.loads(TOOL["parameters"]), "now": {"maxProperties": 0}}


class Model:
    """A vocabulary of bytes and markers, and what reads and constrains its outputs."""

    def __init__(self, markers, **options) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.tokenizer.add_special_tokens([AddedToken(m, special=True) for m in markers])
        loaded = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, eos_token="</s>")
        text = model_text(loaded)
        self.text = ModelText("{{ tools }}", True, text.tokens, text.special, **options)
        self.matcher_tokens = LLTokenizer(self.tokenizer.to_str(), eos_token=[EOS])

    def draw(self, grammar: str, seed: int, most: int = 600) -> str:
        """Return a random output that a grammar allows, which must come to an end."""
        matcher = LLMatcher(self.matcher_tokens, LLMatcher.grammar_from_lark(grammar))
        draw, ids = random.Random(seed), []
        while len(ids) < most:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            assert allowed, matcher.get_error()
            token = EOS if EOS in allowed and draw.random() < 0.3 else draw.choice(allowed)
            if token == EOS:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        raise AssertionError("it does not end")

    def allows(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.matcher_tokens, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def ask(*tools, choice=None, **fields) -> generation_pb2.GenerateRequest:
    stop = fields.pop("stop", None)
    constraint = fields.pop("constraint", None)
    chat = {"messages": [{"role": "user", "content": "?"}], "tools": tools, **fields}
    if choice is not None:
        chat["tool_choice"] = choice
    return generation_pb2.GenerateRequest(chat=chat, stop=stop, constraint=constraint)


def plan(name: str, request, model: Model, tail: str = ""):
    formats = OutputFormats(name, REASONING.get(name, "think"))
    return formats.plan(request, model.text, tail, frozenset({EOS}))


def read(planned, text: str) -> tuple[list[tuple[str, object]], str, str]:
    parser = planned.parser()
    calls, shown = [], {Kind.CONTENT: "", Kind.REASONING: ""}
    for kind, piece in [*parser.feed(text), *parser.flush()]:
        if kind == Kind.CALL:
            calls.append([piece, ""])
        elif kind == Kind.ARGUMENTS:
            calls[-1][1] += piece
        else:
            shown[kind] += piece
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    return parsed, shown[Kind.CONTENT], shown[Kind.REASONING]


@pytest.fixture(scope="module", params=TOOL_FORMATS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> Model:
    template = GEMMA if name == "response_template" else None
    return Model(MARKERS[name], response_template=template)


@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_always_validate(name, model, parallel):
    request = (
        ask(
            TOOL,
            NOW,
            choice={"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED},
            parallel_tool_calls=parallel,
            stop={"max_reasoning_tokens": 20},
        )
        if name not in {"llama3", "pythonic", "phi4", "granite", "kimi"}
        else ask(
            TOOL,
            NOW,
            choice={"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED},
            parallel_tool_calls=parallel,
        )
    )
    planned = plan(name, request, model)
    called = set()
    for seed in range(12):
        text = model.draw(request.constraint.grammar, seed)
        calls, content, _ = read(planned, text)
        assert calls, text
        assert not content.strip(), text
        assert parallel or len(calls) == 1
        for tool, arguments in calls:
            jsonschema.validate(arguments, CHECKED[tool])
        called |= {tool for tool, _ in calls}
    assert called == {"get_weather", "now"}


def test_a_named_tool_is_called(name, model):
    request = ask(TOOL, NOW, choice={"name": "now"})
    planned = plan(name, request, model)
    text = "" if name != "gpt_oss" else "x"
    for seed in range(3):
        text = model.draw(request.constraint.grammar, seed, 5000)
        assert {tool for tool, _ in read(planned, text)[0]} == {"now"}


def test_strict_tools_validate_when_they_are_called(name, model):
    request = ask(TOOL | {"strict": True}, NOW | {"strict": True})
    planned = plan(name, request, model)
    for seed in range(12):
        text = model.draw(request.constraint.grammar, seed, 20000)
        for tool, arguments in read(planned, text)[0]:
            jsonschema.validate(arguments, CHECKED[tool])
