"""`octavo bench` in this process, against a scripted service."""

import sys

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.bench.report import from_json
from octavo.cli.bench.several_values import repeat_names

runner = CliRunner()

SMALL = ("--prompt-tokens", "7", "--output-tokens", "3")


@pytest.fixture
def bench(service):
    def run(*arguments: str):
        command, *rest = arguments
        return runner.invoke(app, ["bench", command, "--address", service.address, *rest])

    return run


def test_what_is_sent(bench, service):
    result = bench("throughput", "-r", "5", "-c", "2", "4", "--warmup", "0", *SMALL)
    assert result.exit_code == 0
    requests = service.requests
    assert len(requests) == 10
    assert {len(request.tokens.token_ids) for request in requests} == {7}
    assert {request.stop.max_tokens for request in requests} == {3}
    assert all(request.stop.ignore_eos and request.output.token_ids for request in requests)
    first, second = (
        {tuple(r.tokens.token_ids) for r in part} for part in (requests[:5], requests[5:])
    )
    assert first == second  # the same work for each concurrency
    assert len(first) == 5
    assert len({request.cache_salt for request in requests}) == 2  # but without cache hits


def test_a_dataset_is_sent(bench, service, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a b c"}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    result = bench("throughput", "--dataset", str(path), "--output-tokens", "9", "--json", "-")
    assert result.exit_code == 0
    report = from_json(result.stdout)
    assert report.runs[0].figures.requests == 2
    assert report.runs[0].figures.output_tokens == 4  # the service answers a word per word
    assert service.requests[0].text == "a b c"
    assert not any(request.stop.ignore_eos for request in service.requests)


def test_a_plot_of_one_run(bench, tmp_path):
    pytest.importorskip("matplotlib")
    prompts, plot = tmp_path / "a.jsonl", tmp_path / "a.svg"
    prompts.write_text('{"prompt": "a b c"}\n')
    result = bench("throughput", "--dataset", str(prompts), "--plot", str(plot))
    assert result.exit_code == 0, result.stderr
    assert all(f"<!-- {name} -->" in plot.read_text() for name in ("TTFT", "TPOT", "ITL", "e2e"))


def test_nobody_there():
    result = runner.invoke(app, ["bench", "latency", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "nothing answers at 127.0.0.1:1" in line


def test_a_model_that_is_not_there(bench):
    result = bench("latency", "--model", "other")
    assert result.exit_code == 1
    assert "no model 'other'; served: m" in result.stderr


def test_no_model_yet(bench, service):
    service.models.clear()
    assert "no model is served yet" in bench("latency").stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["throughput", "-c", "0"], "--concurrency"),
        (["throughput", "-c", "8", "-r", "4", *SMALL], "-c 8 exceeds the 4 requests"),
        (["throughput", "-r", "0"], "--requests"),
        (["throughput", "--prompt-tokens", "60", "--output-tokens", "41"], "101 tokens of prompt"),
        (["throughput", "--prompt-spread", "3"], "--prompt-spread needs --lengths"),
        (["throughput", "--lengths", "uniform"], "--lengths"),
        (["throughput", "--dataset", "/none.jsonl"], "--dataset"),
        (["throughput", "--dataset", __file__, "--lengths", "normal"], "--lengths is for random"),
        (["throughput", "--dataset", __file__], "line 1: Invalid JSON"),
        (["throughput", "--slo", "speed:4"], "speed:4"),
        (["throughput", "--slo", "ttft:0"], "ttft:0"),
        (["throughput", "--slo", "ttft:5", "ttft:6"], "ttft twice"),
        (["throughput", "--json", "/none/a.json"], "/none/a.json"),
        (["throughput", "--plot", "a.gif"], "a.gif"),
        (["throughput", "--", "--num-blocks", "5"], "--num-blocks 5: a server's flags"),
        (["latency", "-c", "2"], "-c"),
        (["serve"], "--rate"),
        (["serve", "--rate", "0"], "--rate 0"),
        (["serve", "--rate", "1", "nan"], "--rate nan"),
        (["serve", "--rate", "1", "two"], "'--rate'"),
        (["serve", "--rate", "1", "--burstiness", "-1"], "--burstiness -1"),
    ],
)
def test_impossible_flags(bench, service, arguments, complaint, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    service.models[0].max_model_len = 100
    result = bench(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert not service.requests


def test_a_plot_without_matplotlib(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("latency", "--plot", "a.png")
    assert result.exit_code == 2
    assert "octavo[bench]" in result.stderr


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("--rate 1 2 4", "--rate 1 --rate 2 --rate 4"),
        ("--rate=1 2 --seed 3", "--rate=1 --rate 2 --seed 3"),
        ("--rate 1 --rate 2 3", "--rate 1 --rate 2 --rate 3"),
        ("--rate 1 -- 2 --rate 3 4", "--rate 1 -- 2 --rate 3 4"),
        ("--seed 1 2 --rate", "--seed 1 2 --rate"),
        ("--rate -1 2", "--rate -1 2"),
    ],
)
def test_options_of_several_values(given, parsed):
    assert repeat_names(given.split(), {"--rate"}) == parsed.split()
