"""The requests of `octavo bench`, and their times."""

import json

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.bench.settings import (
    DATA_SETS,
    Dataset,
    Lengths,
    Open,
    Shape,
    Synthetic,
    Workload,
    choose_lengths,
)
from octavo.cli.bench.workload import ServedModel, arrival_times, draw_lengths, make_requests
from octavo.client import Message

MODEL = ServedModel("m", 2048, 49152)

shapes = st.sampled_from([Shape.FIXED, Shape.NORMAL, Shape.LOGNORMAL])
lengths = st.builds(Lengths, shapes, st.floats(1, 4000), st.floats(0, 4000))


def synthetic(shape=Shape.LOGNORMAL, prompt=(100, 80), output=(50, 40), prefix=0, **options):
    source = Synthetic(Lengths(shape, *prompt), Lengths(shape, *output), prefix)
    options = {"count": 40, "seed": 0, "ignore_eos": True} | options
    return make_requests(Workload(source, **options), MODEL)


@given(lengths, st.integers(1, 3000), st.integers(0, 9))
def test_lengths_are_within_bounds(shape, most, seed):
    drawn = draw_lengths(shape, np.random.default_rng(seed), 200, most)
    assert drawn.min() >= 1
    assert drawn.max() <= most


@pytest.mark.parametrize("shape", [Shape.NORMAL, Shape.LOGNORMAL])
def test_lengths_have_the_mean_and_the_spread_asked_for(shape):
    drawn = draw_lengths(Lengths(shape, 400, 100), np.random.default_rng(0), 100_000, 10**6)
    assert drawn.mean() == pytest.approx(400, rel=0.01)
    assert drawn.std() == pytest.approx(100, rel=0.03)


def test_fixed_lengths_are_exact():
    requests = synthetic(Shape.FIXED, (7, 0), (3, 0))
    assert {len(request.prompt) for request in requests} == {7}
    assert {request.max_tokens for request in requests} == {3}


def test_requests_are_of_the_seed():
    assert synthetic() == synthetic()
    assert synthetic() != synthetic(seed=1)


def test_requests_fit_the_model_and_differ():
    requests = synthetic(prompt=(1500, 1500), output=(1500, 1500), prefix=100)
    assert max(len(r.prompt) + r.max_tokens for r in requests) <= MODEL.max_model_len
    assert all(0 <= t < MODEL.vocab_size for r in requests for t in r.prompt)
    assert len({tuple(r.prompt[:100]) for r in requests}) == 1  # the prefix
    assert len({tuple(r.prompt[:108]) for r in requests}) == len(requests)


def test_what_the_model_does_not_take_is_refused():
    with pytest.raises(typer.BadParameter, match="2049 tokens of prompt and output"):
        synthetic(Shape.FIXED, (2000, 0), (48, 0), prefix=1)
    assert synthetic(Shape.FIXED, (2000, 0), (48, 0))


@pytest.mark.parametrize("shape", [Shape.SHAREGPT, Shape.ALPACA])
def test_data_sets_are_presets_that_flags_change(shape):
    preset = DATA_SETS[shape]
    assert choose_lengths(shape, (None, None), (None, None)) == preset
    prompt, output = choose_lengths(shape, (50, None), (None, 7))
    assert (prompt.mean, prompt.spread) == (50, preset[0].spread)
    assert (output.mean, output.spread) == (preset[1].mean, 7)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    times = arrival_times(Open(5.0, burstiness), 40_000, seed=0)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.floats(0.1, 100), st.integers(0, 50), st.integers(0, 9))
def test_arrivals_at_another_rate_are_the_same_but_for_scale(rate, count, seed):
    times = arrival_times(Open(rate), count, seed)
    assert len(times) == count
    assert (np.diff(times) >= 0).all()
    assert times * rate == pytest.approx(arrival_times(Open(1.0), count, seed))


@pytest.fixture
def dataset(tmp_path):
    def write(*lines, count=None):
        path = tmp_path / "prompts.jsonl"
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("\n".join(texts))
        return make_requests(Workload(Dataset(path, 99), count, 0, ignore_eos=False), MODEL)

    return write


def test_a_dataset(dataset):
    chat = {"messages": [{"role": "user", "content": "hi"}], "source": "ignored"}
    first, second = dataset({"prompt": "a", "max_tokens": 5}, "", chat)
    assert (first.prompt, first.max_tokens) == ("a", 5)
    assert (second.prompt, second.max_tokens) == ([Message("user", "hi")], 99)
    assert not first.ignore_eos


def test_a_dataset_begins_again_if_it_is_short(dataset):
    requests = dataset({"prompt": "a"}, {"prompt": "b"}, count=5)
    assert "".join(request.prompt for request in requests) == "ababa"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["{"], "line 1: Invalid JSON"),
        ([{"prompt": "a"}, {"text": "a"}], "line 2: .*either `prompt` or `messages`"),
        ([{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}], "either"),
        ([{"prompt": ""}], "line 1: prompt: "),
        ([{"prompt": "a", "max_tokens": 0}], "line 1: max_tokens: "),
        ([{"messages": [{"role": "user"}]}], "line 1: messages.0.content: "),
        (["[1]"], "line 1: "),
        ([], "the file has no prompt"),
    ],
)
def test_a_dataset_s_mistakes_are_named(dataset, lines, complaint):
    with pytest.raises(typer.BadParameter, match=complaint):
        dataset(*lines)
