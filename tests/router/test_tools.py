"""Tool calls over gRPC: the model's prompt, the client's answer, and refusals."""

import asyncio
import json

import grpc
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode
from octavo.v1.sampling_pb2 import FinishReason
from tests.router.conftest import byte_level_tokenizer
from tests.router.test_service import collect, ends, error_of, text_of

REQUIRED = {"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content or '' }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if m.role == 'tool' %}[{{ m.name }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:<think>\n{% endif %}"
)
TOOL = {"name": "f", "description": "F", "parameters": '{"type": "object"}'}
OUTPUT = 'Hm.</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("thinker")
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(m, special=True) for m in MARKERS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(path)


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture
def engine(scripted, directory):
    """Creates engines that answer OUTPUT."""
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(m, special=True) for m in MARKERS])
    tokens = [*backend.encode(OUTPUT, add_special_tokens=False).ids, 256]

    def make(**options):
        options = {"vocab_size": 270, "features": {"constraints": True}} | options
        return scripted(tokenizer=directory, script=lambda submit, index: tokens, **options)

    make.backend = backend
    return make


def ask(*messages, tools=(TOOL,), **fields) -> generation_pb2.GenerateRequest:
    chat = {key: fields.pop(key) for key in ("tool_choice",) if key in fields}
    messages = messages or ({"role": "user", "content": "?"},)
    return generation_pb2.GenerateRequest(
        chat={"messages": messages, "tools": tools, **chat}, **fields
    )


def calls_of(responses, index: int = 0) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    for response in responses:
        for piece in response.delta.tool_calls:
            if response.delta.index != index:
                continue
            if piece.id:
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return [(name, arguments) for name, arguments in calls]


def reasoning_of(responses, index: int = 0) -> str:
    return "".join(r.delta.reasoning for r in responses if r.delta.index == index)


async def test_calls_are_streamed_and_survive_their_engine(engine, serve):
    engines = [engine(interval=0.004) for _ in range(2)]
    async with serve(*engines) as s:
        await s.up(2)
        requests = [ask(sampling={"n": 2}) for _ in range(3)]
        tasks = [asyncio.create_task(collect(s.stub.Generate(r))) for r in requests]
        await s.until(lambda: sum(len(one.playing) for one in engines) == 3)
        await asyncio.sleep(0.15)
        await max(engines, key=lambda one: len(one.playing)).kill()
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        await s.clean()
    resumed = [resume for one in engines for submit in one.submits for resume in submit.resume]
    assert any(resume.token_ids for resume in resumed)
    for responses in answers:
        for index in range(2):
            assert calls_of(responses, index) == [("f", '{"a": "é"}')]
            assert text_of(responses, index) == "So:"
            assert reasoning_of(responses, index) == "Hm."
            assert ends(responses)[index].reason == FinishReason.FINISH_REASON_TOOL_CALLS


async def test_chats_with_calls_are_laid_out(engine, serve):
    one = engine()
    call = {"id": "c1", "name": "f", "arguments": '{"a": [1]}'}
    async with serve(one) as s:
        await s.up()
        await collect(
            s.stub.Generate(
                ask(
                    {"role": "developer", "content": "D"},
                    {"role": "user", "parts": [{"text": "x"}, {"text": "y"}]},
                    {"role": "assistant", "reasoning": "R", "tool_calls": [call]},
                    {"role": "tool", "content": "42", "tool_call_id": "c1"},
                )
            )
        )
        hidden = ask(tool_choice={"mode": ToolChoiceMode.TOOL_CHOICE_MODE_NONE})
        responses = await collect(s.stub.Generate(hidden))
    shown, without = (submit.prompt_token_ids for submit in one.submits)

    def decode(token_ids) -> str:
        return engine.backend.decode(list(token_ids), skip_special_tokens=False)

    assert decode(shown) == (
        '[{"type": "function", "function": {"name": "f", "description": "F", "parameters": '
        '{"type": "object"}}}]<s>system:D<s>user:x\ny<s>assistant:(R)<tool_call>{"name": "f", '
        '"arguments": {"a": [1]}}</tool_call><s>tool:42[f]<s>assistant:<think>\n'
    )
    assert decode(without) == "<s>user:?<s>assistant:<think>\n"
    assert not calls_of(responses)
    assert text_of(responses) == 'So:\n\n{"name": "f", "arguments": {"a": "é"}}\n'


async def test_what_must_be_called_is_constrained(engine, serve):
    one = engine()
    async with serve(one) as s:
        await s.up()
        forced = ask(tool_choice=REQUIRED, stop={"max_reasoning_tokens": 5})
        await collect(s.stub.Generate(forced))
        await collect(s.stub.Generate(ask()))
        await collect(s.stub.Generate(ask(tools=(), constraint={"json_object": True})))
    forced, free, after = one.submits
    assert "{0,5}" in forced.constraint.grammar
    assert not forced.stop.HasField("max_reasoning_tokens")
    assert not free.HasField("constraint")
    assert "%json" in after.constraint.grammar


BAD = [
    (ask(tools=[{"name": "a b"}]), "chat.tools[0].name", "1 to 128 letters"),
    (ask(tools=[TOOL, TOOL]), "chat.tools[1].name", "repeats 'f'"),
    (ask(tools=[{"name": str(i)} for i in range(129)]), "chat.tools", "at most 128 entries"),
    (ask(tools=[{"name": "f", "parameters": "{"}]), "chat.tools[0].parameters", "must be JSON"),
    (ask(tools=[{"name": "f", "parameters": "[]"}]), "chat.tools[0].parameters", "JSON object"),
    (
        ask(tools=[{"name": "f", "parameters": '{"type": "array"}'}]),
        "chat.tools[0].parameters",
        "schema of an object",
    ),
    (ask(tool_choice={"name": "g"}), "chat.tool_choice.name", "that of a tool; got 'g'"),
    (ask(tools=[], tool_choice=REQUIRED), "chat.tool_choice", "at least one tool"),
    (ask(tool_choice=REQUIRED, constraint={"regex": "a"}), "constraint", "excludes tools"),
    (
        ask({"role": "user", "content": "a", "parts": [{"text": "b"}]}),
        "chat.messages[0].parts",
        "excludes content",
    ),
    (ask({"role": "user", "parts": [{}]}), "chat.messages[0].parts[0]", "must be text"),
    (
        ask({"role": "user", "tool_calls": [{"name": "f"}]}),
        "chat.messages[0].tool_calls",
        "messages of role 'assistant'",
    ),
    (
        ask(tools=[{"name": "f", "parameters": r'{"properties": {"a": {"enum": ["\ud83d"]}}}'}]),
        "chat.tools[0].parameters",
        "unpaired surrogate at #/properties/a/enum/0",
    ),
    (
        ask(tools=[{"name": "f", "parameters": r'{"properties": {"a\udc00": {}}}'}]),
        "chat.tools[0].parameters",
        "unpaired surrogate at #/properties/a\ufffd",
    ),
    (
        ask({"role": "assistant", "tool_calls": [{}]}),
        "chat.messages[0].tool_calls[0].name",
        "must not be empty",
    ),
    (
        ask(stop={"max_tokens": 3, "max_reasoning_tokens": 4}),
        "stop.max_reasoning_tokens",
        "[0, 3]",
    ),
]


async def test_bad_requests(engine, serve):
    async with serve(engine()) as s:
        await s.up()
        for request, field, says in BAD:
            error = await error_of(s.stub.Generate(request))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, says
            assert field in error.details(), error.details()
            assert says in error.details()


async def test_what_cannot_be_told_apart_is_refused(engine, serve):
    async with serve(engine(features={}), tool_parser="none", reasoning_parser="none") as s:
        await s.up()
        refused = await error_of(s.stub.Generate(ask()))
        assert refused.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "--tool-parser" in refused.details()
        plain = await collect(s.stub.Generate(ask(tools=())))
        assert text_of(plain).startswith("Hm.\n\nSo:")
    async with serve(engine(features={})) as s:
        await s.up()
        error = await error_of(s.stub.Generate(ask(tool_choice=REQUIRED)))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
