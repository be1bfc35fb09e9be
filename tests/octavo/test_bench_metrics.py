"""`octavo bench`'s statistics: examples by hand, and properties of random times."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.bench.metrics import OK, Record, compute_figures, distribution
from octavo.cli.bench.report import Report, Run, from_json, to_json
from octavo.cli.bench.settings import (
    Closed,
    Dataset,
    Lengths,
    Objectives,
    Open,
    Shape,
    Synthetic,
    Target,
    Workload,
)

seconds = st.floats(0, 100).map(lambda value: round(value, 6))


@st.composite
def records(draw) -> Record:
    due, wait, end = draw(seconds), draw(seconds), draw(seconds)
    gaps = draw(st.lists(seconds, max_size=5))
    times = tuple(np.cumsum([due + wait, *gaps]).tolist()) if draw(st.booleans()) else ()
    tokens = tuple(draw(st.integers(1, 4)) for _ in times)
    code = draw(st.sampled_from([OK, OK, "RESOURCE_EXHAUSTED", "UNAVAILABLE"]))
    return Record(
        index=draw(st.integers(0, 99)),
        due=due,
        sent=due + draw(seconds),
        ended=(times[-1] if times else due + wait) + end,
        message_times=times,
        message_tokens=tokens,
        prompt_tokens=draw(st.integers(0, 999)),
        cached_tokens=draw(st.integers(0, 99)),
        output_tokens=sum(tokens),
        code=code,
        error="" if code == OK else draw(st.text(max_size=20)),
    )


some_records = st.lists(records(), max_size=20)


def figures_of(found, objectives=None, length=10.0):
    return compute_figures(found, seconds=length, cpu_seconds=1.0, objectives=objectives)


def test_by_hand():
    first = Record(0, 1.0, 1.1, 3.0, (1.5, 2.0, 2.8), (1, 1, 3), 10, 4, 5)
    second = Record(1, 2.0, 2.0, 4.0, (3.0,), (1,), 20, 0, 1)
    refused = Record(2, 0.0, 0.0, 9.0, code="RESOURCE_EXHAUSTED", error="full")
    found = compute_figures(
        [first, second, refused],
        seconds=4.0,
        cpu_seconds=0.6,
        unfinished=1,
        objectives=Objectives(ttft=600, tpot=400),
    )
    assert (found.requests, found.unfinished) == (2, 1)
    assert found.errors == {"RESOURCE_EXHAUSTED": 1}
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (30, 4, 6)
    assert found.requests_per_s == 0.5
    assert found.output_tokens_per_s == 1.5
    assert found.tokens_per_message == 6 / 4
    assert found.ttft.mean == pytest.approx((500 + 1000) / 2)
    assert found.tpot.p99 == pytest.approx(1500 / 4)  # the first's: the second has one token
    assert found.itl.mean == pytest.approx((500 + 800) / 2)  # gaps of messages, not of tokens
    assert found.e2e.p50 == pytest.approx(2000)
    assert found.normalized.mean == pytest.approx((2000 / 5 + 2000 / 1) / 2)
    assert found.goodput == pytest.approx(1 / 4)
    assert found.lag.mean == pytest.approx(100 / 3)
    assert found.client_cpu_share == pytest.approx(0.15)
    assert found.client_cpu_us_per_token == pytest.approx(1e5)


def test_tokens_that_the_server_only_counts_at_the_end():
    done = Record(0, 0.0, 0.0, 4.0, (1.0, 2.0, 4.0), (), 10, 0, 6)
    found = compute_figures([done], seconds=4.0, cpu_seconds=0.6)
    assert found.tokens_per_message == 6 / 3
    assert found.client_cpu_us_per_token == pytest.approx(1e5)
    assert found.tpot.mean == pytest.approx(3000 / 5)


def test_of_nothing():
    found = compute_figures([], seconds=0.0, cpu_seconds=0.0, objectives=Objectives(e2e=1))
    assert (found.requests, found.requests_per_s, found.goodput) == (0, 0, 0)
    assert found.ttft is found.tpot is found.itl is found.e2e is None


@given(records())
def test_the_parts_of_a_request_make_the_whole(record):
    if record.tpot is not None:
        rest = record.tpot * (record.output_tokens - 1)
        assert record.ttft + rest == pytest.approx(record.e2e)
    span = record.message_times[-1] - record.message_times[0] if record.message_times else 0
    assert record.itl.sum() == pytest.approx(span, abs=1e-9)
    assert 0 <= record.ttft <= record.e2e
    if record.normalized is not None:
        assert record.normalized * record.output_tokens == pytest.approx(record.e2e)


@given(some_records, st.floats(0, 1e5), st.floats(0, 1e5))
def test_goodput_grows_with_the_limit_up_to_all_that_succeeded(found, one, other):
    low, high = sorted((one, other))
    strict = figures_of(found, Objectives(ttft=low, e2e=low))
    loose = figures_of(found, Objectives(ttft=high, e2e=high))
    assert strict.goodput <= loose.goodput <= loose.requests_per_s
    assert figures_of(found, Objectives()).goodput == loose.requests_per_s


@given(some_records)
def test_every_request_is_counted_once(found):
    summed = figures_of(found)
    assert summed.requests + sum(summed.errors.values()) == len(found)
    assert summed.requests_per_s == pytest.approx(summed.requests / 10)


@given(st.lists(seconds, min_size=1))
def test_percentiles_are_in_order_and_in_range(times):
    found = distribution(times)
    low, high = min(times) * 1e3 - 1e-6, max(times) * 1e3 + 1e-6
    assert low <= found.p50 <= found.p90 <= found.p99 <= high
    assert low <= found.mean <= high


lengths = st.builds(Lengths, st.sampled_from(Shape), st.floats(1, 999), st.floats(0, 999))
workloads = st.builds(
    Workload,
    st.builds(Synthetic, lengths, lengths, st.integers(0, 99))
    | st.builds(Dataset, st.just(Path("x")), st.integers(1, 99)),
    st.none() | st.integers(1, 99),
    st.integers(0, 99),
    st.booleans(),
)
plans = st.builds(Closed, st.none() | st.integers(1, 99)) | st.builds(
    Open, st.floats(0.1, 99), st.floats(0.1, 9)
)
runs = st.builds(
    lambda plan, found: Run(plan, figures_of(found, Objectives(ttft=50)), tuple(found)),
    plans,
    some_records,
)
reports = st.builds(
    Report,
    version=st.just("0.1.0"),
    command=st.sampled_from(["throughput", "latency", "serve"]),
    date=st.just("2026-01-02T03:04:05+00:00"),
    client=st.text(max_size=9),
    model=st.text(max_size=9),
    workload=workloads,
    target=st.builds(Target, st.just("h:1"), st.none() | st.just("m"), st.none() | st.just("s")),
    objectives=st.none() | st.builds(Objectives, ttft=st.none() | st.floats(1, 9)),
    runs=st.lists(runs, max_size=2).map(tuple),
    interrupted=st.booleans(),
)


@given(reports)
def test_json_reads_back_the_same(report):
    assert from_json(to_json(report)) == report


def test_json_of_another_layout_is_refused():
    report = Report("0", "serve", "d", "c", "m", Workload(Dataset(Path("x"), 1), 1, 0, True),
                    Target("h:1", None), None, ())  # fmt: skip
    other = to_json(dataclasses.replace(report, format="octavo-bench/9"))
    with pytest.raises(ValueError, match="octavo-bench/1"):
        from_json(other)
