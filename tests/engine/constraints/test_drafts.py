"""Drafts change no token of a constrained output, and save the steps of forced tokens."""

import json
import random

import pytest

from benchmarks.fixture import EOS
from octavo.engine.constraints import matcher as matchers
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.matcher import EndRule, Matcher
from octavo.engine.scheduling.request import BeamSearch, Resumption
from octavo.engine.speculation.method import Guess, Method
from octavo.engine.speculation.methods import make_speculation
from octavo.engine.speculation.speculation import Speculation
from tests.engine.constraints.runner import decode, encode
from tests.engine.constraints.schemas import check, random_schema

ORDER = {
    "type": "object",
    "properties": {
        "customer_reference": {"type": "string", "maxLength": 6},
        "delivery_address": {"type": "string", "maxLength": 6},
        "is_gift": {"type": "boolean"},
    },
    "required": ["customer_reference", "delivery_address", "is_gift"],
    "additionalProperties": False,
}
NO_RULE = EndRule()


def asked():
    """Constraints with parameters of all kinds, as arguments of `Runner.submit`."""
    draw = random.Random(0)
    for number in range(24):
        schema = ORDER if number % 3 else random_schema(draw)
        ways = [
            {},
            {"n": 3},
            {"temperature": 0.0},
            {"min_tokens": 30},
            {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
            {"logprobs": 2, "top_k": 20},
            {"ignore_eos": True},
            {"stop_token_ids": frozenset(encode("x"))},
        ]
        way = ways[number % len(ways)] | {"seed": number, "max_tokens": draw.choice([20, 120])}
        if number == 11:
            way = {"beam": BeamSearch(3), "max_tokens": 40}
        if number == 13:
            way["resume"] = {0: Resumption(tuple(encode('{"customer_re')))}
        yield ("json_schema", json.dumps(schema)), way
    for number in range(4):
        yield (None,), {"seed": number, "max_tokens": 60}
        yield ("regex", "(abc|abd|xyz){3,40}"), {"seed": number, "max_tokens": 90}


class Nothing(Method):
    """Drafts nothing: all drafted tokens come from grammars."""

    def draft(self, history, most):
        return []

    def learn(self, history):
        """It learns nothing."""


class Oracle(Method):
    """Drafts the tokens of a run without drafts, including the end, with random mistakes."""

    def __init__(self, outputs):
        self.outputs = [list(tokens) for tokens in outputs]
        self.rng = random.Random(1)

    def draft(self, history, most):
        output = history.output.tolist()
        for whole in self.outputs:
            if whole[: len(output)] == output:
                draft = whole[len(output) :][:most]
                if draft and self.rng.random() < 0.4:
                    draft[self.rng.randrange(len(draft))] = self.rng.randrange(EOS)
                return draft
        return []

    def learn(self, history):
        """Its drafts cover all sequences."""


def compile_all(runner):
    """Compile all constraints, so that requests do not wait for them one after another."""
    for texts, _ in asked():
        runner.run(*texts, max_tokens=1)


def run(runner):
    """Return the tokens, ends and log-probabilities of all requests."""
    ids = [runner.submit(*texts, **way) for texts, way in asked()]
    outputs = []
    for request_id in ids:
        ended = runner.wait(request_id)
        assert ended.failure is None
        outputs.append((dict(ended.tokens), ended.reasons, dict(ended.logprobs)))
    runner.settle()
    return outputs


@pytest.fixture(scope="module")
def expected(engine):
    outputs = run(engine)
    for ((kind, *texts), way), (tokens, reasons, _) in zip(asked(), outputs, strict=True):
        before = {i: one.token_ids for i, one in way.get("resume", {}).items()}
        for index, reason in reasons.items():
            if kind == "json_schema" and reason == "EOS":
                whole = [*before.get(index, ()), *tokens[index]]
                check(decode(whole), json.loads(texts[0]))
    return outputs


def speculation_of(mode, expected):
    if mode == "forced":
        return Speculation(Nothing(), 6)
    if mode == "oracle":
        known = [tokens for by_index, *_ in expected for tokens in by_index.values()]
        return Speculation(Oracle(known), 6)
    return make_speculation(mode, 6)


@pytest.mark.parametrize(
    ("mode", "preemption", "async_scheduling"),
    [
        ("forced", "swap", False),
        ("oracle", "recompute", False),
        ("suffix", "swap", True),
        ("auto", "recompute", True),
    ],
)
def test_the_same_tokens_with_and_without(crowded, expected, mode, preemption, async_scheduling):
    runner = crowded(preemption=preemption, async_scheduling=async_scheduling, num_blocks=40)
    compile_all(runner)
    runner.parts.scheduler.speculation = speculation_of(mode, expected)
    for found, (tokens, reasons, logprobs) in zip(run(runner), expected, strict=True):
        assert found[:2] == (tokens, reasons)
        assert {i: pytest.approx(values, abs=1e-4) for i, values in found[2].items()} == logprobs
    counters = runner.parts.scheduler.counters
    assert counters[f"preemptions_{preemption}"] > 0
    assert counters["accepted_tokens"] > (0 if mode == "auto" else 100)
    assert mode != "oracle" or counters["accepted_tokens"] < counters["drafted_tokens"]


def test_forced_tokens_take_no_steps_of_their_own(engine):
    engine.parts.scheduler.speculation = Speculation(Nothing(), 16)
    try:
        before = engine.parts.scheduler.counters["accepted_tokens"]
        ended = engine.run("json_schema", json.dumps(ORDER), seed=1)
        accepted = engine.parts.scheduler.counters["accepted_tokens"] - before
    finally:
        engine.parts.scheduler.speculation = None
    names = sum(map(len, ORDER["properties"]))
    assert ended.reasons == {0: "EOS"}
    assert accepted > 0.7 * names
    assert len(set(ended.times)) < len(ended.tokens[0])


@pytest.fixture
def unhurried(monkeypatch):
    """Let a slow machine draft as many tokens as a fast one."""
    for limit in ("DRAFT_SECONDS", "QUICK_SECONDS"):
        monkeypatch.setattr(matchers, limit, 60)


@pytest.fixture(scope="module")
def matcher(engine):
    table = engine.parts.read_tokens()
    tokens = table.build()

    def make(pattern, rule=NO_RULE):
        state = compile_grammar(Constraint(ConstraintKind("regex"), (pattern,)), tokens)
        return Matcher(state, (table.size + 31) // 32, rule)

    return make


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("guess", "draft"),
    [
        ("", "ead bl"),
        ("ead and", "ead bl"),
        ("ead blue", "ead blue"),
        ("ead blue!", "ead blue"),
        ("xyz", "ead bl"),
    ],
)
def test_a_draft_is_what_is_forced_or_the_longer_guess(matcher, guess, draft):
    one, other = matcher("(dead|read) (blue|black){1,9}"), matcher("(dead|read) (blue|black){1,9}")
    one.advance(encode("d"), Guess(encode(guess), 8))
    assert decode(one.draft) == draft
    other.advance(encode("d"))
    for token_id, mask in zip(one.draft, one.draft_masks, strict=True):
        other.advance([token_id])
        assert (mask == other.mask).all()
    one.advance(one.draft)
    assert one.error is None
    assert (one.mask == other.mask).all()


@pytest.mark.usefixtures("unhurried")
def test_an_end_is_not_drafted_and_comes_no_sooner_than_it_may(matcher):
    rule = EndRule(min_tokens=4, early=frozenset([EOS]))
    one, other = matcher("a{1,9}", rule), matcher("a{1,9}", rule)
    one.advance(encode("a"), Guess([*encode("aaaa"), EOS, *encode("a")], 8))
    assert decode(one.draft) == "aaaa"
    ends = []
    other.advance(encode("a"))
    for token_id, mask in zip(one.draft, one.draft_masks, strict=True):
        other.advance([token_id])
        assert (mask == other.mask).all()
        ends.append(bool((int(mask[EOS // 32]) >> (EOS % 32)) & 1))
    assert ends == [False, False, True, True]


@pytest.mark.usefixtures("unhurried")
def test_a_copy_has_no_draft(matcher):
    one = matcher("abcdef")
    one.advance([], Guess((), 3))
    assert decode(one.draft) == "abc"
    assert one.copy().draft == []
