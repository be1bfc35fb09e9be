"""Draft methods that look tokens up, and the policy that drafts where it pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.speculation import suffix_lookup
from octavo.engine.speculation.history import History
from octavo.engine.speculation.matches import LONGEST, find_matches
from octavo.engine.speculation.method_names import METHOD_TEXTS
from octavo.engine.speculation.methods import METHODS, make_speculation
from octavo.engine.speculation.policy import LONGEST_PAUSE, DraftPolicy, StepTimes
from octavo.engine.speculation.prompt_lookup import PromptLookup
from octavo.engine.speculation.suffix_lookup import SuffixLookup


def history(tokens, num_prompt=0, salt=""):
    made = History(num_prompt, salt)
    made.update(list(tokens))
    return made


@given(st.lists(st.integers(0, 3), max_size=60))
def test_the_longest_matches_are_found(tokens):
    found = find_matches(np.array(tokens, np.int32))

    def same(end):
        most = min(end, LONGEST)
        return next((n for n in range(most) if tokens[end - 1 - n] != tokens[-1 - n]), most)

    lengths = {end: same(end) for end in range(1, len(tokens))}
    longest = max(lengths.values(), default=0)
    assert found.length == longest
    ends = [end for end, length in lengths.items() if length == longest and longest]
    assert found.ends.tolist() == ends[-32:]


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9))
def test_a_history_is_its_sequence(parts):
    tokens, grown = [], History(2)
    for part in parts:
        tokens += part
        grown.update(tokens)
        assert grown.tokens.tolist() == tokens
        assert grown.output.tolist() == tokens[2:]


def test_each_method_has_its_name():
    assert METHODS.keys() | {"draft"} == METHOD_TEXTS.keys()  # as a model does


@pytest.mark.parametrize("name", METHODS)
def test_what_followed_before_is_drafted(name):
    method = METHODS[name]()
    assert method.draft(history([5, 6, 7, 8, 9, 1, 5, 6]), 3) == [7, 8, 9]
    longer = [4, 5, 6, 7, 8, 3, 5, 6, 9, 9, 4, 5, 6]  # a match of three tokens wins over two
    assert method.draft(history(longer), 2) == [7, 8]
    assert method.draft(history([1, 2, 3, 4]), 3) == []
    assert method.draft(history([5, 6, 7, 8, 9, 1, 9, 6]), 3) == []  # one token is too few


def test_a_repetition_goes_on():
    assert PromptLookup().draft(history([1, 2, 3, 1, 2, 3, 1, 2]), 6) == [3, 1, 2, 3, 1, 2]


def test_earlier_outputs_are_drafted_from_under_their_salt_alone():
    method = SuffixLookup()
    method.learn(history([1, 2, 10, 11, 12, 13, 14, 15], num_prompt=2, salt="a"))
    now = [50, 10, 11, 12]
    assert method.draft(history(now, salt="a"), 8) == [13, 14, 15]
    assert method.draft(history(now, salt="b"), 8) == []
    assert method.draft(history([7, 1, 2, 10], salt="a"), 8) == [], "a prompt is not learnt"


def test_the_most_frequent_continuation_is_drafted():
    method = SuffixLookup()
    for last in (20, 21, 21, 21, 22):
        method.learn(history([10, 11, 12, last, 30 + last], salt="a"))
    assert method.draft(history([10, 11, 12], salt="a"), 2) == [21, 51]
    for last in range(60, 70):  # none is likely now
        method.learn(history([10, 11, 12, last], salt="a"))
    assert method.draft(history([10, 11, 12], salt="a"), 2) == []


@pytest.mark.parametrize(
    ("departed", "following"),
    [
        ([99], [14, 15, 16, 17]),  # apparently replaces 13
        ([99, 14], [15, 16, 17, 18, 19, 20]),
        ([99, 13], [14, 15, 16, 17, 18, 19]),  # 99 was added
        ([17], [18, 19, 20, 21, 22, 23]),  # 13 to 16 are missing
        ([99, *range(70, 86)], []),  # no longer a copy
    ],
)
def test_a_copy_that_departs_from_its_source_goes_on_near_by(departed, following):
    source = [*range(10, 40), 1]
    made = history([*source, 10, 11, 12])
    method = SuffixLookup()
    assert method.draft(made, 6) == [13, 14, 15, 16, 17, 18]
    for count in range(1, len(departed) + 1):
        made.update([*source, 10, 11, 12, *departed[:count]])
        draft = method.draft(made, 6)
    assert draft == following


def test_little_is_kept_and_the_salt_that_was_longest_unused_goes_first(monkeypatch):
    monkeypatch.setattr(suffix_lookup, "KEPT_TOKENS", 400)
    monkeypatch.setattr(suffix_lookup, "PART", 100)
    method = SuffixLookup()
    for number in range(40):
        method.learn(history(range(100 * number, 100 * number + 20), salt=f"{number % 2}"))
        method.learn(history([1, 2, 3, 4], salt="a")) if not number else None
    assert sum(len(part) for parts in method._parts.values() for part in parts) <= 400
    assert method.draft(history([1, 2, 3], salt="a"), 4) == []
    assert method.draft(history([3900, 3901, 3902], salt="1"), 2) == [3903, 3904]


def test_times_between_measured_sizes_grow_evenly():
    times = StepTimes()
    assert times(np.array([3])).tolist() == [0]
    for _ in range(200):
        times.observe(1, 0.01)
        times.observe(9, 0.02)
    assert times(np.array([1, 5, 9, 18, 36])) == pytest.approx([0.01, 0.015, 0.02, 0.02, 0.04])


def policy(seconds, longest=8):
    """A policy that has seen steps of all sizes."""
    made = DraftPolicy(longest)
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        for _ in range(100):
            made.observe_step(size, seconds(size))
    return made


def drafts_of(made, decodes, right, steps=400):
    """Draft for a sequence whose drafted tokens are right if `right` returns True."""
    speculation = make_speculation("auto", 8)
    speculation._policy = made
    state, drafted = speculation.begin(0, ""), []
    for _ in range(steps):
        length = made.length(state) if made.begin_step(decodes) else 0
        drafted.append(length)
        if length:
            made.drafted(length)
            accepted = next((i for i in range(length) if not right()), length)
            speculation.end_draft(state, length, accepted)
    return drafted


def test_drafts_pay_alone_and_not_in_a_batch_that_fills_the_machine():
    made = policy(lambda size: 0.01 + 0.001 * size)
    assert drafts_of(made, 1, lambda: True)[-10:] == [8] * 10
    assert sum(drafts_of(made, 1, lambda: False)) < 50, "wrong drafts are not given up"
    full = policy(lambda size: 0.001 * size)
    assert sum(drafts_of(full, 48, lambda: True)) == 0


def test_a_sequence_whose_drafts_get_right_drafts_again():
    made = policy(lambda size: 0.01 + 0.001 * size)
    answers = iter([False] * 30 + [True] * 4000)
    drafted = drafts_of(made, 1, lambda: next(answers), steps=1600)
    assert drafted[-20:] == [8] * 20
    pauses = "".join("x" if length else "." for length in drafted).split("x")
    assert max(map(len, pauses)) <= LONGEST_PAUSE


def test_wrong_drafts_without_a_match_do_not_shorten_those_with_one():
    made = policy(lambda size: 0.01 + 0.001 * size)
    state = made.begin(History(0))
    for matched in [True, False] * 100:
        assert made.begin_step(1)
        state.history.alignment.drafted = not matched
        length = made.length(state)
        if not matched:
            length = min(length, made.aligned_length(state))
        made.observe_draft(state, length, length if matched else 0) if length else None
    assert made.length(state) == 8
    assert made.aligned_length(state) == 0
    assert made.aligned_length(made.begin(History(0))) > 0, "they are never tried again"
