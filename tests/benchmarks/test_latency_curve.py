"""The latency curve: its arithmetic, and whole runs with scripted servers."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import latency_curve
from benchmarks.latency_report import Curve, Data, Held, Point, held, markdown, verdicts
from benchmarks.peers import servers
from benchmarks.peers.servers import RunningServer, ServerError, choose
from octavo.cli.bench.metrics import Record, compute_figures
from octavo.cli.bench.settings import Shape

SERVER = Path(__file__).with_name("openai_server.py")
ALPACA = Data(Shape.ALPACA, 1.0)


def point(rate: float, milliseconds: float, *, failed: bool = False) -> Point:
    """A rate at which each request took so long per token."""
    done = Record(0, 0.0, 0.0, milliseconds / 100, (0.0,), (), 5, 0, 10)
    records = [done, replace(done, code="STREAM_BROKEN")] if failed else [done]
    return Point(rate, compute_figures(records, seconds=1.0, cpu_seconds=0.1))


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [point(rate, milliseconds) for rate, milliseconds in pairs]


def test_the_rate_that_is_held_is_between_two_measured_ones():
    found = points((1, 20), (2, 30), (4, 90), (8, 50))
    assert held(found, 60) == Held(pytest.approx(3.0))
    assert held(found, 30) == Held(pytest.approx(2.0))
    assert held(found, 90) == Held(8, at_least=True)
    assert held(found, 19) == Held(0.0)
    assert held([], 19) == Held(0.0)


def test_a_rate_at_which_requests_fail_is_not_held():
    found = [point(1, 20), point(2, 21, failed=True)]
    assert held(found, 60) == Held(1.0)


def test_data_have_the_papers_means_times_their_scale():
    whole = Data.parse("sharegpt").requests(4000, 1)
    quarter = Data.parse("sharegpt:0.25").requests(4000, 1)
    for requests, scale in ((whole, 1), (quarter, 0.25)):
        outputs = sum(request.max_tokens for request in requests) / len(requests)
        assert outputs == pytest.approx(338 * scale, rel=0.08)  # clipped at the context
        most = max(len(request.prompt) + request.max_tokens for request in requests)
        assert most <= servers.CONTEXT * scale
    assert "x 0.25" in Data.parse("sharegpt:0.25").title


@pytest.mark.parametrize("text", ["fixed", "sharegpt:0", "sharegpt:2", "sharegpt:x", "uniform"])
def test_data_that_are_none(text):
    with pytest.raises(ValueError, match=r".+"):
        Data.parse(text)


@pytest.mark.parametrize(
    ("octavo", "verdict"),
    [
        (points((1, 10), (2, 10), (4, 100)), "PASS"),
        (points((1, 10), (1.2, 90), (2, 90)), "FAIL"),
        (points((1, 10), (1.2, 12)), "OPEN"),  # it may hold more than was sent
    ],
)
def test_verdicts(octavo, verdict):
    curve = Curve(ALPACA, {"vllm": points((1, 20), (2, 100)), "octavo-bf16": octavo})
    (line,) = verdicts([curve], {"vllm": "vLLM", "octavo-bf16": "Octavo"}, "vllm")
    assert line.startswith(verdict)
    assert "at 60 ms/token" in line  # three times 20


def test_no_verdict_without_saturation_or_reference():
    titles = {"vllm": "vLLM", "octavo-bf16": "Octavo"}
    fast = points((1, 10), (2, 11))
    (line,) = verdicts([Curve(ALPACA, {"vllm": fast, "octavo-bf16": fast})], titles, "vllm")
    assert "do not reach" in line
    (line,) = verdicts([Curve(ALPACA, {"octavo-bf16": fast})], titles, "vllm")
    assert "was not measured" in line


def test_the_report():
    curve = Curve(ALPACA, {"vllm": points((1, 20), (2, 100)), "o": points((1, 10), (2, 12))})
    curve.points["vllm"].append(point(3, 100, failed=True))
    page = markdown(
        *([curve], {"vllm": "vLLM", "o": "Octavo"}, "vllm"),
        skipped={"AMD PACE": "this CPU lacks avx512f"},
        facts=["How."],
        plot="a.svg",
    )
    assert "| 1 | vLLM | 1 | 20.0 | 20.0 | 20.0 |" in page
    assert "1 x STREAM_BROKEN" in page
    assert "| 60 ms (3x) | 1.50 | at least 2.00 (at least 1.33x) |" in page
    assert "- AMD PACE: this CPU lacks avx512f" in page
    assert "![Normalized latency by rate](a.svg)" in page


def test_servers_are_refused_by_name(tmp_path, monkeypatch):
    (pace,) = choose(["pace"], [])
    monkeypatch.setattr(servers, "cpu_features", lambda: frozenset({"avx2"}))
    with pytest.raises(ServerError, match="this CPU lacks avx512_bf16, avx512f"):
        pace.check(tmp_path, install=True)
    monkeypatch.setattr(servers, "cpu_features", lambda: pace.needs)
    with pytest.raises(ServerError, match="--install"):
        pace.check(tmp_path, install=False)


@pytest.mark.parametrize(
    ("names", "own", "complaint"),
    [
        (["vlm"], [], "no server is called 'vlm'; there are octavo-bf16"),
        ([], ["a"], "NAME=COMMAND"),
        ([], ["a=serve"], "{port}"),
        (["vllm"], ["vllm=serve {port}"], "named twice"),
    ],
)
def test_servers_that_are_none(names, own, complaint):
    with pytest.raises(ValueError, match=complaint.replace("{", r"\{")):
        choose(names, own)


def test_a_server_that_does_not_start_says_why(tmp_path):
    (kind,) = choose([], [f"a={sys.executable} -c 'print({{port}}, \"no memory\")'"])
    with (
        RunningServer(
            kind, Path(sys.executable), tmp_path, threads=1, log=tmp_path / "a.log"
        ) as server,
        pytest.raises(ServerError, match=r"ended with code 0: .*no memory"),
    ):
        server.wait_ready()


def curve(tmp_path, monkeypatch, *arguments: str) -> str:
    """Run the benchmark with the flags; return its report."""
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    common = ["--servers", "--model", tmp_path, "--folder", tmp_path / "f", "--output", tmp_path]
    common += ["--lengths", "alpaca:0.1", "--machine", "a test"]
    monkeypatch.setattr(latency_curve, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["latency_curve", *map(str, common), *arguments])
    latency_curve.main()
    return (tmp_path / "latency_curve.md").read_text()


def test_a_run(tmp_path, monkeypatch, capsys):
    """The slower server saturates; the other holds all that was sent."""
    command = f"{sys.executable} {SERVER} {{port}}"
    own = ["--server", f"slow={command} 0.02", "--server", f"octavo-fake={command} 0.001"]
    own += [
        "--server",
        f"short={command} 0.001 1",
        "--server",
        f"dead={sys.executable} -c {{port}}",
    ]
    rates = ("--rates", "2", "30", "--seconds", "1", "--least", "4", "--reference", "slow")
    page = curve(tmp_path, monkeypatch, *own, *rates)
    assert "## Alpaca, lengths x 0.1" in page
    for rate in (2, 30):
        assert f"\n| {rate} | slow |" in page
        assert f"\n| {rate} | octavo-fake |" in page
    assert "- short: an output has " in page
    assert "- dead: it ended with code 0" in page
    assert "PASS: Alpaca, lengths x 0.1, octavo-fake: at least " in page
    assert "slow" in (tmp_path / "latency_curve.svg").read_text()
    assert "octavo-fake: starting" in capsys.readouterr().out
