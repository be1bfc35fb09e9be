"""`octavo bench` against a real server with a real model."""

import json
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.bench.report import from_json
from tests.integration.harness import wait_until

SMALL = ("--prompt-tokens", "24", "--output-tokens", "6")


@pytest.fixture
def bench(served):
    def run(*arguments: str):
        command, *rest = arguments
        return CliRunner().invoke(app, ["bench", command, "--address", served.address, *rest])

    return run


def test_throughput(bench, tmp_path):
    files = ("--json", str(tmp_path / "a.json"))
    result = bench("throughput", "-r", "6", "-c", "1", "6", *SMALL, *files)
    assert result.exit_code == 0, result.stderr
    assert "tokens/s" in result.stdout
    report = from_json((tmp_path / "a.json").read_text())
    assert [run.plan.concurrency for run in report.runs] == [1, 6]
    for run in report.runs:
        figures = run.figures
        assert (figures.requests, figures.input_tokens, figures.output_tokens) == (6, 144, 36)
        assert figures.cached_tokens == 0  # the second run, too
        assert all(sum(record.message_tokens) == 6 for record in run.records)
        assert 0 < figures.ttft.p50 < figures.e2e.p50
    # Concurrency 1 runs one at a time; full concurrency runs all at once.
    one, six = ([(r.sent, r.ended) for r in run.records] for run in report.runs)
    assert all(end <= start for (_, end), (start, _) in pairwise(one))
    assert max(start for start, _ in six) < min(end for _, end in six)


def test_serve(bench, tmp_path):
    pytest.importorskip("matplotlib")
    random = ("--lengths", "lognormal", "--prefix-tokens", "32", "--timeout", "60")
    files = ("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"))
    result = bench("serve", "--rate", "4", "20", "-r", "5", *SMALL, *random, *files)
    assert result.exit_code == 0, result.stderr
    slow, fast = from_json((tmp_path / "a.json").read_text()).runs
    assert slow.figures.requests == fast.figures.requests == 5
    assert slow.records[-1].due == pytest.approx(5 * fast.records[-1].due, rel=1e-3)
    early = 0.002  # the event loop's timers have millisecond resolution
    assert all(record.sent > record.due - early for record in slow.records)
    assert len({record.prompt_tokens for record in slow.records}) > 1
    assert slow.figures.cached_tokens >= 4 * 32  # the prefix
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_openai_api(served):
    """The HTTP port is measured like the gRPC port."""
    flags = ("--rate", "20", "-r", "5", *SMALL, "--json", "-")
    result = CliRunner().invoke(app, ["bench", "serve", "--url", served.http, *flags])
    assert result.exit_code == 0, result.stderr
    (run,) = from_json(result.stdout).runs
    figures = run.figures
    assert (figures.requests, figures.input_tokens, figures.output_tokens) == (5, 120, 30)
    assert figures.cached_tokens == 0  # not even the warm-up's
    assert 0 < figures.ttft.p50 < figures.e2e.p50
    assert figures.normalized.mean == pytest.approx(figures.e2e.mean / 6)
    assert all(1 <= len(record.message_times) <= 6 for record in run.records)


def test_deadlines_are_counted(bench):
    sizes = ("--prompt-tokens", "24", "--output-tokens", "1500")
    flags = ("--timeout", "0.3", "--warmup", "0", "--json", "-")
    result = bench("throughput", "-r", "3", *sizes, *flags)
    assert result.exit_code == 1  # none succeeded
    # Refused at once if the router already knows how long so much work takes.
    errors = from_json(result.stdout).runs[0].figures.errors
    assert errors in ({"DEADLINE_EXCEEDED": 3}, {"RESOURCE_EXHAUSTED": 3})


def test_ctrl_c_prints_what_was_measured(served, tmp_path):
    path = tmp_path / "a.json"
    flags = ["-r", "5000", "-c", "2", "--prompt-tokens", "4", "--output-tokens", "2"]
    flags += ["--address", served.address, "--json", str(path)]
    before = served.metric("octavo_router_requests_total")
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "bench", "throughput", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(
        lambda: served.metric("octavo_router_requests_total") > before + 8, 60, "some requests"
    )
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "TTFT" in stdout
    report = from_json(path.read_text())
    assert report.interrupted
    assert 0 < report.runs[0].figures.requests < 5000
    assert report.runs[0].figures.unfinished == 2
    assert json.loads(path.read_text())["format"] == "octavo-bench/1"


def test_a_server_of_its_own_gets_its_flags():
    result = CliRunner().invoke(
        app, ["bench", "latency", "--serve", "demo", "--", "--device", "abacus"]
    )
    assert result.exit_code == 1
    assert "octavo serve demo --device abacus ended with code 2" in result.stderr
    assert "--device: Input should be" in result.stderr
