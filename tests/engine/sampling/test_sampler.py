"""The sampler samples exactly from the distribution in the contract."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.engine.sampling import sampler
from octavo.engine.sampling.random_numbers import uniforms
from octavo.engine.scheduling.batch import Batch, ScheduledSequence
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob

VOCAB = 512
DRAWS = 20_000
PROMPT = (1, 2, 3)


def sampling_row(output=(), *, index=0, min_tokens=0, eos=(), bad_words=(), **params):
    sampling = SamplingParams(**params)
    request = Request(
        0, "r", PROMPT, sampling, 100, 0.0, min_tokens=min_tokens, eos_token_ids=frozenset(eos),
        bad_words=bad_words,
    )  # fmt: skip
    sequence = Sequence(0, index, [*PROMPT, *output], len(PROMPT))
    return SequenceGroup(request, [sequence])


class Draw(NamedTuple):
    """A sampled token."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits, rows, inputs=None):
    whole = [
        ScheduledSequence(group, sequence, 0, sequence.num_tokens, [], [sequence])
        for group in rows
        for sequence in group.sequences
    ]
    samples = Batch(rest=whole).samples()
    tokens, reports = sampler.sample(logits, samples, range(len(rows)), inputs)
    places, report = reports or ([], None)
    logprobs = dict(zip(places, report.logprobs() if report else [], strict=True))
    return [Draw(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def logits_of(seed, vocab=VOCAB, scale=2.0):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw_many(logits, count=DRAWS, **params):
    """Sample `count` times with different seeds, in batches of mixed parameters."""
    tokens = []
    for seeds in (range(at, min(at + 500, count)) for at in range(0, count, 500)):
        rows = [sampling_row(seed=seed, **params) for seed in seeds]
        tokens += [d.token_id for d in sample(logits.repeat(len(rows), 1), rows)]
    return np.bincount(tokens, minlength=len(logits))


def warped(logits, *warpers):
    """Return the distribution after transformers' own warpers."""
    scores = LogitsProcessorList(warpers)(torch.tensor([[0]]), logits[None].clone())
    return torch.softmax(scores[0].double(), -1).numpy()


def assert_follows(counts, expected):
    """Test chi-square at 0.001, with tokens of small expectation pooled."""
    assert counts[expected == 0].sum() == 0, "a token that was cut off was drawn"
    frequent = expected * counts.sum() >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    wanted *= counts.sum() / wanted.sum()
    keep = wanted > 0
    # Imported here, as it takes each of the processes that collect tests a second.
    from scipy import stats

    result = stats.chisquare(
        observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()
    )
    assert result.pvalue > 1e-3


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.5}, [TemperatureLogitsWarper(1.5)]),
        ({"top_k": 20}, [TopKLogitsWarper(20)]),
        ({"top_k": VOCAB // 2 + 50}, [TopKLogitsWarper(VOCAB // 2 + 50)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.9999}, [TopPLogitsWarper(0.9999)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
            [
                TemperatureLogitsWarper(0.9),
                TopKLogitsWarper(50),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ],
        ),
        (
            {"top_k": VOCAB // 2 + 100, "top_p": 0.98},
            [TopKLogitsWarper(VOCAB // 2 + 100), TopPLogitsWarper(0.98)],
        ),
    ],
    ids=lambda value: " ".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_follows_the_exact_distribution(params, warpers):
    logits = logits_of(0)
    assert_follows(draw_many(logits, **params), warped(logits, *warpers))


def test_a_flat_distribution_needs_the_whole_vocabulary():
    logits = torch.zeros(VOCAB)
    counts = draw_many(logits, top_p=0.9)
    assert np.count_nonzero(counts) == pytest.approx(0.9 * VOCAB, abs=1)


@given(
    seed=st.integers(0, 2**64 - 1),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    temperature=st.floats(0.01, 100),
    row=st.integers(0, 7),
)
@settings(max_examples=80, deadline=None)
def test_a_seed_gives_the_same_token_in_any_company(seed, top_k, top_p, min_p, temperature, row):
    logits = torch.stack([logits_of(i) for i in range(8)])
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    others = itertools.cycle(
        [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_p": 0.99999}, {"logprobs": 3}]
    )
    company = [sampling_row(seed=i, **next(others)) for i in range(8)]
    company[row] = sampling_row(seed=seed, **params)
    alone = sample(logits[row : row + 1].clone(), [company[row]])
    together = sample(logits.clone(), company)
    assert together[row].token_id == alone[0].token_id


def test_draws_are_independent_across_positions_outputs_and_seeds():
    grid = np.meshgrid(np.arange(40), np.arange(10), np.arange(50), indexing="ij")
    draws = uniforms(*(axis.astype(np.uint64) for axis in grid))
    from scipy import stats

    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    for axis in range(3):
        pairs = np.moveaxis(draws, axis, 0)
        correlation = np.corrcoef(pairs[:-1].ravel(), pairs[1:].ravel())[0, 1]
        assert abs(correlation) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1001, 3 * 128, 32_000, 4 * 1024])
def test_greedy_takes_the_lowest_of_the_greatest(vocab, dtype):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [7, 9, vocab - 1]] = 9.0
    logits[1, [vocab - 1, vocab - 3]] = 9.0
    logits[2] = -3.0
    expected = [row.tolist().index(row.max().item()) for row in logits]
    draws = sample(logits, [sampling_row(temperature=0.0) for _ in expected])
    assert [draw.token_id for draw in draws] == expected


def test_repetition_penalty_is_transformers():
    logits = logits_of(3)
    ours = logits.clone()[None]
    sample(ours, [sampling_row(output=(4, 5, 5), repetition_penalty=1.7, temperature=0.0)])
    ids = torch.tensor([[*PROMPT, 4, 5, 5]])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())
    torch.testing.assert_close(ours, theirs)


def test_presence_and_frequency_penalties_count_the_output_alone():
    logits = torch.zeros(1, VOCAB)
    sample(logits, [sampling_row(output=(4, 5, 5), presence_penalty=0.5, frequency_penalty=0.25)])
    expected = torch.zeros(1, VOCAB)
    expected[0, 4], expected[0, 5] = -0.75, -1.0
    torch.testing.assert_close(logits, expected)


def test_each_row_has_its_own_penalties():
    logits = torch.stack([logits_of(seed) for seed in range(4)])
    rows = [
        sampling_row(output=(4, 5, 5), repetition_penalty=1.7),
        sampling_row(output=(4, 5, 5)),
        sampling_row(output=(9, 9, 9, 8), frequency_penalty=0.5),
        sampling_row(output=(), presence_penalty=-1.0, repetition_penalty=0.5),
    ]
    expected = logits.clone()
    for i in (0, 3):
        ids = torch.tensor([rows[i].sequences[0].token_ids])
        penalty = RepetitionPenaltyLogitsProcessor(rows[i].request.sampling.repetition_penalty)
        expected[i] = penalty(ids, expected[i : i + 1])
    expected[2, 9] -= 1.5
    expected[2, 8] -= 0.5
    sample(logits, rows)
    torch.testing.assert_close(logits, expected)


def test_penalties_follow_an_output_that_grows_and_one_that_a_beam_search_replaces():
    row = sampling_row(output=(4, 5), presence_penalty=1.0)
    (sequence,) = row.sequences

    def penalized():
        logits = torch.zeros(1, 256)
        sample(logits, [row])
        return logits[0].nonzero()[:, 0].tolist()

    assert penalized() == [4, 5]
    sequence.token_ids.extend(range(6, 200))
    assert penalized() == [4, 5, *range(6, 200)]
    sequence.token_ids = [*PROMPT, 7, 9]
    assert penalized() == [7, 9]


def test_bias_moves_a_token():
    drawn = sample(torch.zeros(1, VOCAB), [sampling_row(temperature=0.0, logit_bias={11: 5.0})])
    assert drawn[0].token_id == 11


def test_only_allowed_tokens_are_drawn():
    logits = logits_of(1)
    best = logits.topk(3).indices.tolist()
    counts = draw_many(logits, 2_000, allowed_token_ids=best[1:])
    assert set(np.flatnonzero(counts)) == set(best[1:])
    rows = [
        sampling_row(temperature=0.0, allowed_token_ids=best[2:]),
        sampling_row(temperature=0.0),
    ]
    assert [draw.token_id for draw in sample(logits.repeat(2, 1), rows)] == [best[2], best[0]]


@pytest.mark.parametrize(
    ("output", "expected"),
    [((), 9), ((4,), 7), ((5,), 9), ((4, 5), 9), ((5, 4), 7), ((3, 4, 5), 8), ((6, 4, 5), 8)],
)
@pytest.mark.parametrize("launched", [False, True], ids=["known", "launched"])
def test_a_bad_word_is_never_completed(output, expected, launched):
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 9, 8, 7]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    words = ((10,), (4, 9), (3, 4, 5, 9), (4, 8), (6, 4, 5, 9), (6, 9), (5, 7))
    row = sampling_row(temperature=0.0, bad_words=words, output=output)
    inputs = torch.tensor([output[-1] if output else PROMPT[-1]])
    if launched and output:
        (sequence,) = row.sequences
        sequence.token_ids.pop()
        sequence.append_placeholder()
    assert sample(logits, [row], inputs)[0].token_id == expected


def test_bad_words_leave_reported_logprobs_alone():
    logits = logits_of(5)
    best, second = logits.topk(2).indices.tolist()
    row = sampling_row(temperature=0.0, bad_words=((best,),), logprobs=1)
    drawn = sample(logits.clone()[None], [row])[0]
    assert drawn.token_id == second
    assert drawn.logprob.top[0][0] == best


def test_stopping_tokens_wait_for_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 50.0
    early = sampling_row(temperature=0.0, min_tokens=2, eos=(9,), output=(4,))
    late = sampling_row(temperature=0.0, min_tokens=2, eos=(9,), output=(4, 4))
    assert sample(logits.clone(), [early])[0].token_id != 9
    assert sample(logits.clone(), [late])[0].token_id == 9


def test_logprobs_are_the_models_own():
    logits = logits_of(5)
    biased = sampling_row(logit_bias={3: 100.0}, temperature=0.3, logprobs=4)
    drawn = sample(logits.clone()[None], [biased])[0]
    own = torch.log_softmax(logits, -1)
    assert drawn.token_id == 3
    assert drawn.logprob.logprob == pytest.approx(own[3].item(), abs=1e-5)
    values, ids = own.topk(4)
    assert [token for token, _ in drawn.logprob.top] == ids.tolist()
    assert [value for _, value in drawn.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_nothing_is_drawn_outside_the_vocabulary_even_from_nan():
    logits = torch.full((3, VOCAB), torch.nan)
    rows = [sampling_row(), sampling_row(top_p=0.5), sampling_row(temperature=0.0)]
    assert all(0 <= draw.token_id < VOCAB for draw in sample(logits, rows))


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45])
def test_the_smallest_temperature_is_greedy(params, temperature):
    logits = logits_of(6).repeat(2, 1)
    rows = [sampling_row(temperature=temperature, seed=seed, **params) for seed in range(2)]
    chosen = [draw.token_id for draw in sample(logits.clone(), rows)]
    assert chosen == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_the_smallest_repetition_penalty_takes_what_was_seen(params):
    logits = torch.full((1, VOCAB), 1.0)
    logits[0, [1, 2, 3]] = torch.tensor([-1.0, 5.0, -1.0])
    drawn = sample(logits, [sampling_row(repetition_penalty=1e-40, **params)])
    assert drawn[0].token_id == 2


def test_the_smallest_top_p_is_greedy():
    logits = logits_of(7)[None]
    drawn = sample(logits.clone(), [sampling_row(top_p=1e-45)])
    assert drawn[0].token_id == logits.argmax().item()
