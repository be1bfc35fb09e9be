"""Outputs with reasoning and calls, token by token."""

import json
import random

import pytest
from tokenizers import AddedToken

from octavo.router.requests.output import Output
from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.formats import OutputPlan
from octavo.router.text.model_text import ModelText
from octavo.router.text.tokenizer import backend_pieces
from octavo.v1.sampling_pb2 import FinishReason, OutputOptions, StopConditions, TokenLogprob
from tests.router.conftest import byte_level_tokenizer

EOS = FinishReason.FINISH_REASON_EOS
LENGTH = FinishReason.FINISH_REASON_LENGTH
TOOL_CALLS = FinishReason.FINISH_REASON_TOOL_CALLS
STOP_STRING = FinishReason.FINISH_REASON_STOP_STRING
END = 256
CALL = '<tool_call>\n{"name": "f", "arguments": {"é": "日本"}}\n</tool_call>'
OUTPUT = f"<think>\nHm, stop.\n</think>\n\nSo:\n{CALL}\n{CALL.replace('日本', 'b')}"


@pytest.fixture(scope="module", params=[True, False], ids=["special", "spelt"])
def tokenizer(request):
    """Markers that are special tokens, which are decoded to nothing, or that no token has."""
    tokenizer = byte_level_tokenizer()
    if request.param:
        markers = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<other>"]
        tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return tokenizer


@pytest.fixture
def make(tokenizer):
    added = tokenizer.get_added_tokens_decoder().items()
    tokens = {token.content: i for i, token in added}
    model = ModelText("", False, tokens, frozenset(t.content for _, t in added if t.special))
    calls, reasoning = TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]
    plan = OutputPlan(model, calls=calls, reasoning=reasoning)

    def make(stop=None, **options) -> Output:
        return Output(
            0,
            backend_pieces(tokenizer),
            StopConditions(**stop or {}),
            OutputOptions(**options),
            plan,
        )

    return make


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


class Reader:
    """The message that a client assembles from an output's deltas."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[list[str]] = []
        self.token_ids: list[int] = []

    def take(self, output: Output) -> None:
        delta = output.take()
        if delta is None:
            return
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids += delta.token_ids
        for call in delta.tool_calls:
            if call.index == len(self.calls):
                assert call.id
                self.calls.append([call.id, call.name, ""])
            else:
                assert not call.id
                assert not call.name
            self.calls[call.index][2] += call.arguments


@pytest.mark.parametrize("seed", range(12))
def test_any_pace_gives_the_same(tokenizer, make, seed):
    draw = random.Random(seed)
    tokens = [*ids(tokenizer, OUTPUT), END]
    output, reader = make(token_ids=True, logprobs=0), Reader()
    at = 0
    while at < len(tokens):
        step = tokens[at : at + draw.choice([1, 1, 2, 7, 1000])]
        at += len(step)
        logprobs = [TokenLogprob(token_id=token) for token in step]
        output.push(step, logprobs, EOS if at == len(tokens) else 0)
        if draw.random() < 0.7:
            reader.take(output)
    reader.take(output)
    assert (reader.text, reader.reasoning) == ("So:", "Hm, stop.")
    assert [json.loads(arguments) for _, _, arguments in reader.calls] == [
        {"é": "日本"},
        {"é": "b"},
    ]
    assert {name for _, name, _ in reader.calls} == {"f"}
    assert len({call_id for call_id, _, _ in reader.calls}) == 2
    assert reader.token_ids == tokens
    finished = output.finish(1, 0)
    assert finished.reason == TOOL_CALLS
    assert finished.stop_token_id == END
    reasoning = len(ids(tokenizer, "\nHm, stop.\n"))
    spelt = len(ids(tokenizer, "</think>")) - 1  # tokens of an incomplete marker
    assert finished.usage.reasoning_tokens == reasoning + spelt


def test_whole_outputs_have_whole_calls(tokenizer, make):
    output = make()
    output.push([*ids(tokenizer, OUTPUT), END], [], EOS)
    delta = output.take()
    assert [json.loads(call.arguments) for call in delta.tool_calls] == [{"é": "日本"}, {"é": "b"}]
    assert [call.index for call in delta.tool_calls] == [0, 1]
    assert output.take() is None


def test_stop_strings_are_looked_for_in_content_alone(tokenizer, make):
    output, reader = make({"strings": ["stop", "name", "So"]}), Reader()
    output.push([*ids(tokenizer, OUTPUT), END], [], EOS)
    reader.take(output)
    assert (output.reason, reader.text, reader.reasoning) == (STOP_STRING, "", "Hm, stop.")
    assert not reader.calls
    unstopped = make({"strings": ["stop", "name"]})
    unstopped.push([*ids(tokenizer, OUTPUT), END], [], EOS)
    assert unstopped.reason == TOOL_CALLS


def test_a_cut_output_keeps_its_reason(tokenizer, make):
    for end in range(len(ids(tokenizer, OUTPUT))):
        output, reader = make(), Reader()
        output.push(ids(tokenizer, OUTPUT)[:end], [], LENGTH)
        reader.take(output)
        assert output.reason == LENGTH
        assert "Hm, stop.\n</think".startswith(reader.reasoning)
        assert not any(marker in reader.text for marker in ("<think>", "<tool_call>"))
        for _, name, cut in reader.calls:
            assert name == "f"
            arguments = cut.rstrip("\ufffd")  # half a character
            assert arguments in {'{"é": "日本"}'[: len(arguments)], '{"é": "b"}'[: len(arguments)]}


@pytest.mark.parametrize(("keep", "shown"), [(True, "a<other>b"), (False, "ab")])
def test_other_special_tokens_are_as_ever(tokenizer, make, keep, shown):
    if "<other>" not in tokenizer.get_vocab():
        shown = "a<other>b"
    output = make({"include_in_output": True}, keep_special_tokens=keep)
    output.push([*ids(tokenizer, "<think>x</think>a<other>b"), END], [], EOS)
    delta = output.take()
    assert (delta.text, delta.reasoning) == (f"{shown}</s>", "x")
