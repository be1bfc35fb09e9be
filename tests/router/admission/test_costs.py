import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.admission.claims import Claim, Claims
from octavo.router.admission.output_lengths import (
    DEFAULT_LENGTH,
    MIN_SAMPLES,
    RECENT_OUTPUTS,
    SAFE_QUANTILE,
    OutputLengths,
)
from octavo.router.admission.rates import (
    ALLOWED_MISSES,
    MARGIN_BOUNDS,
    DrainRate,
    Margin,
    Pace,
)
from octavo.v1 import engine_pb2
from tests.plain import budget
from tests.router.admission.fixture import BLOCK, request


def claim(prompt=BLOCK, output=BLOCK, *, sequences=1, lengths=None, **fields) -> Claim:
    state = request(
        sequences=sequences, prompt_tokens=prompt, min_tokens=output, max_tokens=output, **fields
    )
    return Claim(state, lengths or OutputLengths())


# Output lengths.


def test_lengths_unknown_are_a_guess_within_the_limits():
    lengths = OutputLengths()
    assert lengths.expected(10_000) == DEFAULT_LENGTH
    assert lengths.expected(100) == 100
    assert lengths.expected(10_000, min_tokens=1_000) == 1_000
    assert lengths.expected(10_000, sampled=DEFAULT_LENGTH) == 2 * DEFAULT_LENGTH


def test_lengths_are_learned_from_those_that_ended():
    lengths = OutputLengths()
    for length in range(1, 101):
        lengths.add(length, max_tokens=1000)
    assert lengths.expected(1000) == pytest.approx(100 * SAFE_QUANTILE, abs=1)
    assert lengths.expected(1000, quantile=0.5) == pytest.approx(50, abs=1)
    assert lengths.expected(1000, sampled=90) == pytest.approx(98, abs=1), "of those longer than 90"
    assert lengths.expected(600, sampled=100) == 200, "longer than all before it"
    assert lengths.expected(513) == pytest.approx(80, abs=1)
    assert lengths.expected(4000) == DEFAULT_LENGTH, "another kind of request"


def test_only_late_lengths_count():
    lengths = OutputLengths()
    for _ in range(RECENT_OUTPUTS):
        lengths.add(10, max_tokens=1000)
    for _ in range(RECENT_OUTPUTS):
        lengths.add(500, max_tokens=1000)
    assert lengths.expected(1000, quantile=0.0) == 500


@given(
    st.lists(st.integers(1, 1000), max_size=MIN_SAMPLES + 20),
    st.integers(1, 1000),
    st.integers(0, 999),
    st.integers(0, 1000),
)
def test_expected_lengths_keep_to_the_limits(known, max_tokens, sampled, min_tokens):
    lengths = OutputLengths()
    for length in known:
        lengths.add(length, max_tokens)
    sampled, min_tokens = min(sampled, max_tokens - 1), min(min_tokens, max_tokens)
    expected = lengths.expected(max_tokens, min_tokens=min_tokens, sampled=sampled)
    assert max(sampled + 1, min_tokens) <= expected <= max_tokens


# Blocks.


def test_outputs_share_the_prompts_full_blocks():
    one = claim(prompt=40, sequences=1)
    four = claim(prompt=40, sequences=4)
    assert (one.blocks(budget(1 << 20, BLOCK)), four.blocks(budget(1 << 20, BLOCK))) == (3, 6)
    four.state.output_tokens = 4 * 9  # 8 + 9 tokens outside of the shared blocks
    assert four.blocks(budget(1 << 20, BLOCK)) == 2 + 4 * 2


def test_a_request_fits_by_what_it_will_need():
    claims = Claims(budget(1 << 20, BLOCK))
    load = engine_pb2.Load(free_blocks=6, cached_blocks=2)
    assert claims.fits(claim(output=7 * BLOCK), 0, load)
    assert not claims.fits(claim(output=8 * BLOCK), 0, load)
    assert claims.fits(claim(prompt=5 * BLOCK, output=7 * BLOCK), 4 * BLOCK, load), "4 are cached"
    load = engine_pb2.Load(free_blocks=6, cached_blocks=2, used_swap_blocks=1)
    assert not claims.fits(claim(output=7 * BLOCK), 0, load), "those in swap space come back first"


def test_what_the_report_does_not_know_yet_counts():
    claims = Claims(budget(1 << 20, BLOCK))
    load = engine_pb2.Load(free_blocks=8)
    given_before = claim(prompt=3 * BLOCK, output=2 * BLOCK)
    claims.add(given_before, 0)
    assert not claims.fits(claim(prompt=2 * BLOCK, output=2 * BLOCK), 0, load)
    given_before.state.output_tokens = 1
    load = engine_pb2.Load(free_blocks=8)  # this report has its prompt
    assert claims.fits(claim(prompt=2 * BLOCK, output=2 * BLOCK), 0, load)
    load = engine_pb2.Load(free_blocks=8, waiting=4)  # of another router
    assert not claims.fits(claim(prompt=2 * BLOCK, output=2 * BLOCK), 0, load)


def test_those_that_end_before_make_room():
    """Three blocks are free; two more will be when the nearly finished request ends."""
    load = engine_pb2.Load(free_blocks=3)
    claims = Claims(budget(1 << 20, BLOCK))
    ending = claim(prompt=BLOCK, output=2 * BLOCK)
    claims.add(ending, 0)
    ending.state.output_tokens = 2 * BLOCK - 1
    assert claims.fits(claim(prompt=BLOCK, output=4 * BLOCK), 0, load)
    ending.state.output_tokens = 1
    load = engine_pb2.Load(free_blocks=3)
    assert not claims.fits(claim(prompt=BLOCK, output=4 * BLOCK), 0, load)


RUNNING = st.lists(
    st.tuples(st.integers(1, 40), st.integers(2, 60), st.integers(1, 3), st.floats(0, 0.99)),
    max_size=8,
)


@given(RUNNING)
def test_the_peak_is_that_of_playing_it_through(running):
    """A simulation token by token needs the predicted blocks, except for rounding."""
    claims = Claims(budget(1 << 20, 1))
    held, left = [], []
    for prompt, output, sequences, done in running:
        c = claim(prompt, output, sequences=sequences)
        claims.add(c, 0)
        sampled = max(1, int(done * output))
        c.state.output_tokens = sampled * sequences
        held.append([c.blocks(budget(1 << 20, 1)), sequences])
        left.append(output - sampled)
    newcomer = claim(5, 20)
    held.append([newcomer.blocks(budget(1 << 20, 1)), 1])
    left.append(20)
    in_use = sum(blocks for blocks, _ in held[:-1])
    most, alive = sum(blocks for blocks, _ in held), list(range(len(held)))
    for step in range(1, 61):
        for i in alive:
            held[i][0] += held[i][1]
        most = max(most, sum(held[i][0] for i in alive))
        alive = [i for i in alive if left[i] > step]
    needed = most - in_use
    assert claims.fits(newcomer, 0, engine_pb2.Load(free_blocks=needed))
    assert not claims.fits(newcomer, 0, engine_pb2.Load(free_blocks=needed - 1))


# Rates.


def test_the_queue_drains_at_the_rate_of_when_somebody_waits():
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.per_second() is None
    rate.begin()
    for _ in range(20):
        now[0] += 0.5
        rate.add(100)
    assert rate.per_second() == pytest.approx(200, rel=0.1)
    rate.end()
    now[0] += 1000.0
    assert rate.per_second() == pytest.approx(200, rel=0.1), "nobody waited"
    rate.begin()
    for _ in range(100):
        now[0] += 1.0
        rate.add(100)
    assert rate.per_second() == pytest.approx(100, rel=0.1), "of late it was less"
    now[0] += 60.0
    assert math.isclose(rate.per_second() or 0.0, 0.0, abs_tol=10.0), "nothing leaves any more"


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_the_margin_is_what_few_waits_exceed(spread):
    draw = random.Random(1)
    margin, missed = Margin(), []
    for _ in range(40_000):
        missed.append(draw.lognormvariate(0, spread) > margin.value)
        if missed[-1]:
            margin.missed()
        else:
            margin.kept()
    assert sum(missed[20_000:]) / 20_000 <= 2 * ALLOWED_MISSES
    assert margin.value < 1 + 8 * spread, "nor is the queue left empty"


def test_the_margin_has_bounds():
    margin = Margin()
    for _ in range(100):
        margin.missed()
    assert margin.value == MARGIN_BOUNDS[1]
    for _ in range(100_000):
        margin.kept()
    assert margin.value == MARGIN_BOUNDS[0]


def test_pace_is_learned_from_whole_requests():
    now = [100.0]
    pace = Pace(lambda: now[0])

    def end(first, last, tokens, **fields):
        c = claim(output=tokens, **fields)
        c.since = now[0]
        state = c.state
        state.lengths = [tokens, tokens // 2]
        state.first_time, state.last_time = now[0] + first, now[0] + last
        pace.add(c)

    end(9.0, 9.0, 50)  # a beam search's, which comes at once
    end(9.0, 10.0, 50, migrated=True)
    for _ in range(10):
        assert pace.seconds(11) is None or _ >= MIN_SAMPLES
        end(0.5, 1.5, 11)
    assert pace.seconds(21) == pytest.approx(2.5)
    now[0] += 1000.0
    assert pace.seconds(21) is None
