"""Grammars of outputs: the parser reads every allowed output as valid calls of its tools."""

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from octavo.common.limits import MAX_CONSTRAINT_BYTES, Limits
from octavo.common.rpc import RpcError
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.token_table import TokenTable
from octavo.router.requests.output import Output
from octavo.router.requests.output_plan import OutputFormats
from octavo.router.requests.parsers import TOOL_FORMATS
from octavo.router.requests.parsers.glm import JOINED
from octavo.router.requests.parsers.parser import PieceKind
from octavo.router.requests.parsers.pythonic import LFM2
from octavo.router.requests.tool_validation import check_tools
from octavo.router.text.lark import escaped, rename
from octavo.router.text.model_text import ModelText, model_text
from octavo.router.text.tokenizer import backend_pieces
from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode
from octavo.v1.sampling_pb2 import FinishReason, OutputOptions, StopConditions
from tests.plain import budget
from tests.router.conftest import byte_level_tokenizer
from tests.router.requests.parsers.outputs import EXAMPLES, GEMMA, SCHEMAS
from tests.router.requests.test_calls import Reader

EOS = 256
LIMITS = Limits(4096, 512, 8, (budget(16, 16),), beam_search=True, constraints=True)
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
    "llama3": ["<|python_tag|>"],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
    "dsml": ["\uff5cDSML\uff5c", "<think>", "</think>"],
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"],
    "tool_calls": ["<tool_calls>", "</tool_calls>"],
    "nemotron": [],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>"],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>"],
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
    """A vocabulary of bytes and markers, with its parser and constraints."""

    def __init__(self, markers, **options) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.tokenizer.add_special_tokens([AddedToken(m, special=True) for m in markers])
        loaded = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, eos_token="</s>")
        text = model_text(loaded)
        self.text = ModelText("{{ tools }}", True, text.tokens, text.special, **options)
        size = self.tokenizer.get_vocab_size()
        self.matcher_tokens = TokenTable(self.tokenizer.to_str(), size, (EOS,)).build()
        self.pieces = backend_pieces(self.tokenizer)

    def draw(self, grammar: str, seed: int, most: int = 2000) -> str:
        """Return the text of a random output that a grammar allows."""
        return self.tokenizer.decode(self.draw_ids(grammar, seed, most), skip_special_tokens=False)

    def draw_ids(self, grammar: str, seed: int, most: int = 2000) -> list[int]:
        """Return a random output that a grammar allows and ends."""
        matcher = self.matcher(grammar)
        draw, ids = random.Random(seed), []
        while len(ids) < most:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            assert allowed, matcher.get_error()
            token = EOS if EOS in allowed and draw.random() < 0.3 else draw.choice(allowed)
            if token == EOS:
                return ids
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        raise AssertionError("it does not end")

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of an output."""
        return compile_grammar(Constraint(ConstraintKind.GRAMMAR, (grammar,)), self.matcher_tokens)

    def bytes(self, text: bytes) -> list[int]:
        """Return the tokens of single bytes."""
        letters = bytes_to_unicode()
        return [self.tokenizer.token_to_id(letters[byte]) for byte in text]

    def allows(self, grammar: str, text: str) -> bool:
        matcher = self.matcher(grammar)
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


def plan(name: str, request, model: Model, tail: str = "", limits: Limits = LIMITS):
    asked = request.SerializeToString(deterministic=True)
    planned = OutputFormats(name).plan(request, model.text, tail, frozenset({EOS}), limits)
    assert request.SerializeToString(deterministic=True) == asked, "a plan leaves the message alone"
    return planned


def read(planned, text: str) -> tuple[list[tuple[str, object]], str, str]:
    parser = planned.parser()
    calls, shown = [], {PieceKind.CONTENT: "", PieceKind.REASONING: ""}
    for kind, piece in [*parser.feed(text), *parser.flush()]:
        if kind == PieceKind.CALL:
            calls.append([piece, ""])
        elif kind == PieceKind.ARGUMENTS:
            calls[-1][1] += piece
        else:
            shown[kind] += piece
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    return parsed, shown[PieceKind.CONTENT], shown[PieceKind.REASONING]


@pytest.fixture(scope="module", params=TOOL_FORMATS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> Model:
    template = GEMMA if name == "response_template" else None
    return Model(MARKERS[name], response_template=template)


@pytest.mark.few(8)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_always_validate(name, model, parallel):
    reasons = OutputFormats().reasoning(model.text) is not None
    request = ask(
        TOOL,
        NOW,
        choice={"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED},
        parallel_tool_calls=parallel,
        stop={"max_reasoning_tokens": 20} if reasons else None,
    )
    planned = plan(name, request, model)
    called = set()
    for seed in range(12):
        text = model.draw(planned.constraint.grammar, seed)
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
    for seed in range(3):
        text = model.draw(planned.constraint.grammar, seed, 5000)
        assert {tool for tool, _ in read(planned, text)[0]} == {"now"}


NAMES = ["fs.read", "srv/tool", "ns:tool:2", "a.b/c:d-e_f", "1.2", "a:0", "x" * 128, "/.:"]
"""Tool names as from Model Context Protocol servers."""


@pytest.mark.few(30)
@pytest.mark.parametrize("tool", NAMES)
def test_names_come_back_as_they_are(name, model, tool):
    request = ask(TOOL | {"name": tool}, choice={"name": tool})
    check_tools(request.chat)
    planned = plan(name, request, model)
    text = model.draw(planned.constraint.grammar, 1, 5000)
    assert {called for called, _ in read(planned, text)[0]} == {tool}


def test_strict_tools_validate_when_they_are_called(name, model):
    request = ask(TOOL | {"strict": True}, NOW | {"strict": True})
    planned = plan(name, request, model)
    for seed in range(12):
        text = model.draw(planned.constraint.grammar, seed, 20000)
        for tool, arguments in read(planned, text)[0]:
            jsonschema.validate(arguments, CHECKED[tool])


THINKS = ["<think>", "</think>"]
FORMS = {
    "json_schema": (json.dumps({"type": "object", "required": ["a"]}), '{"a": 1}', '{"b": 1}'),
    "json_object": (True, '{"b": [1]}', "[1]"),
    "regex": (r"[a-c]+/\d\s?", "abc/7", "abc7"),
    "grammar": ('start: "start" A\nA: /start+/ // start', "startstarttt", "start"),
    "choices": ({"values": ["yes", 'no "x"']}, 'no "x"', "no"),
}


@pytest.fixture(scope="module")
def thinker() -> Model:
    return Model([*THINKS, *MARKERS["hermes"][:2]])


@pytest.mark.parametrize("kind", FORMS)
def test_a_constraint_begins_after_the_reasoning(thinker, kind):
    value, good, bad = FORMS[kind]
    for tail, lead, wrong in (
        ("assistant\n", "<think>b < c\n</think>\n\n", "</think>"),
        ("assistant\n", "", "#"),
        ("<think>\n", "b < c\n</think>\n\n", ""),
    ):
        request = ask(constraint={kind: value})
        planned = plan("hermes", request, thinker, tail)
        grammar = planned.constraint.grammar
        assert thinker.allows(grammar, lead + good)
        assert not thinker.allows(grammar, lead + bad)
        assert not thinker.allows(grammar, wrong + good)
        assert read(planned, lead + good) == ([], good, "b < c" if lead else "")


def test_a_constraint_stays_where_there_is_no_reasoning(thinker):
    for tail, model in (("<think>\n\n</think>\n\n", thinker), ("assistant\n", Model([]))):
        request = ask(constraint={"regex": "a"})
        planned = plan("hermes", request, model, tail)
        assert planned.constraint.regex == "a"
    text = generation_pb2.GenerateRequest(text="a<think>", constraint={"regex": "a"})
    planned = plan("hermes", text, thinker)
    assert planned.parser() is None
    assert planned.constraint.regex == "a"


@pytest.mark.parametrize("tail", ["<think>\n", "assistant\n"])
@pytest.mark.parametrize("limit", [0, 3])
def test_reasoning_is_bounded(thinker, tail, limit):
    request = ask(stop={"max_reasoning_tokens": limit})
    planned = plan("hermes", request, thinker, tail)
    grammar = planned.constraint.grammar
    opening = "" if "<think>" in tail else "<think>"
    assert thinker.allows(grammar, f"{opening}{'x' * limit}</think>\n\nyes <tool_call>") == bool(
        limit or not opening
    )
    assert not thinker.allows(grammar, f"{opening}{'x' * (limit + 1)}</think>yes")
    assert thinker.allows(grammar, "yes") == bool(opening)
    assert not thinker.allows(grammar, f"yes <think>{'x' * (limit + 1)}</think>")


def test_calls_and_answers_under_a_constraint(thinker):
    request = ask(TOOL, NOW, constraint={"regex": "yes"})
    planned = plan("hermes", request, thinker)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, wanted in (("yes", ([], "yes", "")), (call, ([("now", {})], "", ""))):
        assert thinker.allows(planned.constraint.grammar, text)
        assert read(planned, text) == wanted
    assert not thinker.allows(planned.constraint.grammar, "no")


def test_free_calls_are_not_constrained(thinker):
    request = ask(TOOL, NOW)
    planned = plan("hermes", request, thinker)
    assert planned.constraint is None
    one = plan("hermes", ask(TOOL, NOW, parallel_tool_calls=False), thinker)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"any": 1}}\n</tool_call>'
    assert thinker.allows(one.constraint.grammar, f"I look.\n{call}")
    assert not thinker.allows(one.constraint.grammar, f"{call}\n{call}")


OWN = {
    "qwen3_coder": {"one"},
    "glm": {"one", "joined"},
    "minimax": {"two"},
    "seed_oss": {"one"},
    "dsml": {"two"},
    "pythonic": {"list", "markers alone"},
    "tool_calls": {"list"},
    "nemotron": {"list"},
    "longcat": {"two"},
    "internlm": {"one"},
    "hermes": {"one", "reasons"},
    "llama3": {"one", "two"},
    "mistral": {"list", "reasons"},
    "deepseek": {"V3", "R1"},
    "kimi": {"two"},
    "phi4": {"markers"},
    "granite": {"list"},
    "gpt_oss": {"call"},
}
"""Examples that a grammar of forced calls allows; the parser reads others, too."""


@pytest.mark.parametrize(
    "example",
    [e for e in EXAMPLES if e.name in OWN.get(e.format, ())],
    ids=lambda e: f"{e.format}-{e.name}",
)
def test_what_a_family_learnt_to_write_is_allowed(example):
    markers = [m for m in MARKERS[example.format] if m != "<|call|>"]
    if example.name == "list":
        markers = [m for m in markers if m != "[ARGS]"]
    model = Model(markers)
    template = {"V3": "```json", "R1": "```json", "joined": JOINED}.get(example.name, "")
    if example.format == "pythonic":
        template, markers = (LFM2, []) if example.name == "markers alone" else ("", [])
        model = Model(markers)
    model.text = ModelText(template, True, model.text.tokens, model.text.special)
    tools = [{"name": name, "parameters": json.dumps(s)} for name, s in SCHEMAS.items()]
    request = ask(*tools, choice={"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED})
    planned = plan(example.format, request, model, example.tail)
    assert model.allows(planned.constraint.grammar, example.output.removesuffix("<|call|>"))


def test_a_constraint_that_the_router_makes_has_limits(thinker):
    forced = ask(TOOL, choice={"name": "get_weather"})
    with pytest.raises(RpcError, match="cannot constrain outputs"):
        plan("hermes", forced, thinker, limits=replace(LIMITS, constraints=False))
    escaped_thrice = {"const": ["\u00e9" * (MAX_CONSTRAINT_BYTES // 3)], "uniqueItems": True}
    schema = json.dumps(escaped_thrice, ensure_ascii=False)
    lenient = ask(constraint={"json_schema": schema, "lenient": True})
    with pytest.raises(RpcError, match="at most 1048576 bytes"):
        plan("hermes", lenient, thinker)


def test_bounds_need_marked_reasoning(thinker):
    for request, model, says in (
        (ask(stop={"max_reasoning_tokens": 1}), Model([]), "does not mark reasoning"),
        (
            generation_pb2.GenerateRequest(text="a", stop={"max_reasoning_tokens": 1}),
            thinker,
            "only outputs of chats",
        ),
    ):
        with pytest.raises(RpcError, match=says) as caught:
            plan("hermes", request, model)
        assert caught.value.field == "stop.max_reasoning_tokens"


@pytest.mark.parametrize(
    ("grammar", "renamed"),
    [
        ("start: A start-x\nA: /start/", "new: A start-x\nA: /start/"),
        ('start: "start" start // start', 'new: "start" new // start'),
        ('start: %json {"start": "}"} start', 'new: %json {"start": "}"} new'),
        ('a: start[lazy] | "\\"start"', 'a: new[lazy] | "\\"start"'),
    ],
)
def test_rules_are_renamed(grammar, renamed):
    assert rename(grammar, "start", "new") == renamed


def test_templates_tell_the_family():
    for text, wanted in (
        ("{{ tools }}<tool_call>", "hermes"),
        ("", "hermes"),
        ("{{ tools }}<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("{{ tools }}<tool_call><arg_key>", "glm"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ("{{ tools }}<|channel|><|message|>", "gpt_oss"),
        ("{{ tools }}something else", None),
    ):
        found = OutputFormats().tools(ModelText(text, "tools" in text))
        assert (found and found.name) == wanted, text
    request = ask(NOW)
    with pytest.raises(RpcError, match="--tool-parser and one of response_template") as caught:
        OutputFormats().check(request.chat, ModelText("{{ tools }}", True))
    assert caught.value.field == "chat.tools"
    with pytest.raises(RpcError, match="started with --tool-parser none"):
        OutputFormats("none").check(request.chat, ModelText())
    OutputFormats("none").check(ask().chat, ModelText())


def outputs_of(planned, model: Model, grammar: str, seed: int, pace: int) -> tuple:
    """Sample an output; return its calls, content and reasoning, as clients get them."""
    ids = model.draw_ids(grammar, seed)
    output, reader = Output(0, model.pieces, StopConditions(), OutputOptions(), planned), Reader()
    for at in range(0, len(ids), pace):
        output.push(ids[at : at + pace], [], 0)
        reader.take(output)
    output.push([EOS], [], FinishReason.FINISH_REASON_EOS)
    reader.take(output)
    calls = [(called, json.loads(arguments)) for _, called, arguments in reader.calls]
    return calls, reader.text, reader.reasoning


def bounded(model: Model) -> dict | None:
    """Return a limit of reasoning, if there is any, so that random outputs end."""
    reasons = OutputFormats().reasoning(model.text) is not None
    return {"max_reasoning_tokens": 5} if reasons else None


def texts_of(name: str) -> list[str]:
    return [*MARKERS[name], *THINKS, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|im_end|>"]


@pytest.fixture(scope="module", params=["tokens", "spelt"])
def either_model(request, name) -> Model:
    if request.param == "spelt" and name in {"gpt_oss", "response_template"}:
        pytest.skip("its markers are always tokens")
    template = GEMMA if name == "response_template" else None
    return Model(MARKERS[name] if request.param == "tokens" else [], response_template=template)


@pytest.mark.few(8)
@pytest.mark.parametrize("pace", [1, 1000])
def test_an_answer_keeps_the_texts_of_markers(name, either_model, pace):
    model = either_model
    for text in texts_of(name):
        document = {"a": f"{text} {text}{{", "name": text}
        form = {"json_schema": json.dumps({"const": document})}
        request = ask(NOW | {"strict": True}, constraint=form, stop=bounded(model))
        planned = plan(name, request, model)
        found = set()
        for seed in range(4):
            calls, content, _ = outputs_of(planned, model, planned.constraint.grammar, seed, pace)
            assert bool(calls) != bool(content.strip())
            assert calls or json.loads(content) == document
            found.add(bool(calls))
        assert False in found


@pytest.mark.parametrize("pace", [1, 1000])
@pytest.mark.parametrize("kind", ["choices", "regex"])
def test_an_answer_may_begin_with_a_marker_s_text(thinker, kind, pace):
    for text in (*THINKS, "<tool_call>", "</tool_call>"):
        for answer in (text, f"{text}a{text}", f"a</think>{text}"):
            value = {"values": [answer]} if kind == "choices" else escaped(answer)
            for tail in ("assistant\n", "<think>\n", "<think>\n\n</think>\n\n"):
                request = ask(constraint={kind: value}, stop={"max_reasoning_tokens": 40})
                planned = plan("hermes", request, thinker, tail)
                for seed in range(3):
                    grammar = planned.constraint.grammar or f"start: {json.dumps(answer)}"
                    found = outputs_of(planned, thinker, grammar, seed, pace)
                    assert found[:2] == ([], answer)


@pytest.mark.few(8)
@pytest.mark.parametrize("pace", [1, 1000])
def test_arguments_keep_the_texts_of_markers(name, either_model, pace):
    model = either_model
    for text in texts_of(name):
        schema = {"type": "object", "properties": {"a": {"enum": [f"{text} {text}"]}}}
        tool = {"name": "f", "parameters": json.dumps({**schema, "required": ["a"]})}
        choice = {"name": "f"}
        request = ask(tool, choice=choice, parallel_tool_calls=False, stop=bounded(model))
        planned = plan(name, request, model)
        for seed in range(2):
            calls, content, _ = outputs_of(planned, model, planned.constraint.grammar, seed, pace)
            assert calls == [("f", {"a": f"{text} {text}"})]
            assert not content.strip()


def test_reasoning_may_spell_its_end(thinker):
    request = ask(constraint={"choices": {"values": ["yes"]}})
    planned = plan("hermes", request, thinker, "<think>\n")
    spelt = [*thinker.bytes(b"a </think> b"), thinker.text.tokens["</think>"]]
    output, reader = Output(0, thinker.pieces, StopConditions(), OutputOptions(), planned), Reader()
    output.push([*spelt, *thinker.bytes(b"yes"), EOS], [], FinishReason.FINISH_REASON_EOS)
    reader.take(output)
    assert (reader.reasoning, reader.text) == ("a </think> b", "yes")


def test_a_response_template_that_is_not_there_is_no_parser():
    model = Model(MARKERS["hermes"])
    formats = OutputFormats("response_template", "response_template")
    assert formats.reasoning(model.text) is None
    with pytest.raises(RpcError, match=r"no response template; start the router with --tool-par"):
        formats.check(ask(TOOL).chat, model.text)
