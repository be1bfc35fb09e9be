"""The peer benchmark: its requests, its arithmetic, and real worker processes."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers import (
    model_files,
    registry,
    report,
    rounds,
    shapes,
    workloads,
)
from benchmarks.peers.model_files import DIRECTORY, GGUF
from benchmarks.peers.results import Rate, Result, Sample, agreement, first_token_seconds, ratios
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from benchmarks.peers.workers.protocol import Outcome, Request, Setup

ROOT = Path(__file__).parents[2]
ECHO = [sys.executable, str(Path(__file__).with_name("echo_worker.py"))]
REQUESTS = [Request([5, 6, 7], 4), Request([8], 2)]


def setup(**options):
    return Setup("nowhere", threads=1, cache_gib=0.5, options=options)


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(patience=60.0):
        variables = {"PYTHONPATH": str(ROOT)}
        started.append(WorkerProcess(ECHO, variables, tmp_path / "worker.log", patience))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


def test_the_mix_has_the_stated_totals_and_the_same_lengths_each_round():
    one, other = workloads.mixed(1), workloads.mixed(2)
    for mix in (one, other):
        assert len(mix.requests) == 48
        assert (mix.prompt_tokens, mix.output_tokens) == (7_853, 5_406)
        assert all(256 <= token < 49_152 for r in mix.requests for token in r.prompt)
        assert min(len(r.prompt) for r in mix.requests) >= workloads.SHORTEST
    lengths = [(len(r.prompt), r.output_tokens) for r in one.requests]
    assert lengths == [(len(r.prompt), r.output_tokens) for r in other.requests]
    assert len(set(lengths)) > 40, "they are spread"
    assert one == workloads.mixed(1)
    assert all(a.prompt != b.prompt for a, b in zip(one.requests, other.requests, strict=True))


def test_rounds_single_requests_and_warm_up_share_no_prompt():
    drawn = [workloads.single(seed).requests[0] for seed in (0, 1, rounds.WARM_UP)]
    assert len({tuple(request.prompt) for request in drawn}) == 3
    assert {(len(r.prompt), r.output_tokens) for r in drawn} == {(24, 128)}


def test_each_round_begins_with_another_peer_and_has_all():
    orders = [rounds.turned(registry.PEERS, number) for number in range(len(registry.PEERS))]
    assert {order[0].name for order in orders} == {peer.name for peer in registry.PEERS}
    assert all(set(map(id, order)) == set(map(id, registry.PEERS)) for order in orders)
    assert rounds.turned([], 3) == []


def test_an_interrupted_run_keeps_what_it_measured(tmp_path):
    class Interrupted:
        def provide(self, peer):
            pass

        def run(self, peer, number, result):
            if (peer.name, number) == ("octavo-int8", 1):
                raise KeyboardInterrupt
            result.samples.append(Sample(number, "mixed", 1.0, 1, None, (1,)))

    results = rounds.measure(Interrupted(), registry.choose("octavo"), 9, lambda _: None)
    assert [len(one.samples) for one in results] == [1] * 6, "the second round began with int8"


def test_peers_are_chosen_by_name_and_by_its_beginning():
    assert registry.choose("") == registry.PEERS
    assert [peer.name for peer in registry.choose("vllm,octavo-int8")] == ["vllm", "octavo-int8"]
    weights = [peer.weights for peer in registry.choose("octavo")]
    assert weights == ["bf16", "int8", "int4", "int8", "int4", "int4"]
    with pytest.raises(ValueError, match=r"no peer is called 'octav'.*openvino-int4"):
        registry.choose("octav")


def test_each_peer_is_pinned_and_has_a_worker_and_a_known_form():
    assert len({peer.name for peer in registry.PEERS}) == len(registry.PEERS)
    for peer in registry.PEERS:
        assert (ROOT / "benchmarks/peers/workers" / f"{peer.worker}.py").exists()
        assert peer.form in {DIRECTORY, GGUF}
        assert (peer.environment is None) == peer.is_octavo
        if peer.environment:
            assert "==" in peer.environment.requirements[0]


def test_a_model_is_chosen_by_its_shape_or_directory_and_peers_by_its_forms(tmp_path):
    assert model_files.choose("demo").forms == {DIRECTORY, GGUF}
    shape = model_files.choose("qwen3-moe")
    names = {peer.name for peer in registry.choose("", forms=shape.forms)}
    assert {"octavo-int4", "vllm", "transformers-static"} <= names
    assert not {"llama-cpp-int4", "openvino-int4"} & names
    with pytest.raises(ValueError, match="openvino-int4 needs a GGUF file"):
        registry.choose("openvino", forms=shape.forms)
    with pytest.raises(ValueError, match=r"no model is called 'qwen9' \(demo, qwen3-0.6b"):
        model_files.choose("qwen9")
    (tmp_path / "config.json").write_text('{"vocab_size": 700}')
    own = model_files.choose(str(tmp_path))
    assert own.provide(DIRECTORY, tmp_path / "elsewhere") == tmp_path.resolve()
    mix = workloads.mixed(0, 12, own.vocabulary)
    assert max(token for r in mix.requests for token in r.prompt) in range(600, 700)


def test_another_checkout_is_measured_beside_this_one(tmp_path):
    peers = registry.with_before(registry.choose("octavo-int8,vllm"), tmp_path)
    assert [peer.name for peer in peers] == ["octavo-int8", "vllm", "octavo-int8-before"]
    assert [peer.is_octavo for peer in peers] == [True, False, False], "the others are compared"
    assert peers[-1].options == peers[0].options
    assert peers[-1].checkout == tmp_path


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_is_saved_with_the_layers_it_names(name, tmp_path):
    shape = shapes.SHAPES[name]
    shapes.save(_shrunk(shape), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == shape.model_type
    assert len(model.model.layers) == shape.settings["num_hidden_layers"]
    assert model.config.vocab_size == workloads.VOCABULARY
    assert len(AutoTokenizer.from_pretrained(tmp_path)("one two three").input_ids) == 3
    logits = model(torch.tensor([[300, 301, 302]])).logits
    assert logits.isfinite().all()
    assert logits.std() > 0


def _shrunk(shape):
    """The shape with its number of layers, but small ones."""
    kept = {"num_hidden_layers", "layer_types", "mamba_n_groups", "mamba_expand"}
    kept |= {"norm_topk_prob", "position_embedding_type", "num_key_value_heads"}
    kept |= {"tie_word_embeddings"}
    small = {"head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
    small |= {"num_attention_heads": shape.settings["num_key_value_heads"] * 2}
    small |= {"hidden_size": 64, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}
    settings = {
        key: value if key in kept else small.get(key, 16) for key, value in shape.settings.items()
    }
    return dataclasses.replace(shape, settings=settings)


def test_a_worker_answers_whatever_is_printed_around_it(start, tmp_path):
    worker = start()
    assert set(worker.load(setup())) == {"rich"}
    outcome = worker.run(REQUESTS)
    assert outcome.outputs == [[5, 6, 7, 5], [8, 8]]
    assert outcome.first_token_seconds == [0.1, 0.1]
    assert worker.run(REQUESTS[:1]).outputs == [[5, 6, 7, 5]]
    log = (tmp_path / "worker.log").read_text()
    assert "what a library prints" in log
    assert "what its children print" in log


def test_a_paused_worker_stands_still_with_its_children_and_goes_on(start):
    worker = start()
    worker.load(setup())
    child = psutil.Process(int(worker.run(REQUESTS).note.split()[1]))
    worker.pause()
    assert _status(child, psutil.STATUS_STOPPED) == psutil.STATUS_STOPPED
    assert _status(child.parent(), psutil.STATUS_STOPPED) == psutil.STATUS_STOPPED
    worker.resume()
    assert _status(child, psutil.STATUS_SLEEPING) == psutil.STATUS_SLEEPING
    assert worker.run(REQUESTS).outputs == [[5, 6, 7, 5], [8, 8]]
    worker.pause()
    worker.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running(), "paused or not, what it started ends with it"


def _status(process, wanted):
    """Return the status once it is `wanted`, or after a timeout."""
    for _ in range(200):
        if process.status() == wanted:
            break
        time.sleep(0.05)
    return process.status()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("run", "RuntimeError: no luck"),
        ("one token less", "request 0 asked for 4 tokens and got 3"),
        ("one output less", "2 requests, 1 outputs"),
        ("die", "it died: .*what its children print"),
    ],
)
def test_a_worker_that_fails_says_why(start, fault, message):
    worker = start()
    worker.load(setup(fault=fault))
    with pytest.raises(WorkerError, match=message):
        worker.run(REQUESTS)


def test_a_worker_that_cannot_load_says_why_and_ends(start):
    worker = start()
    with pytest.raises(WorkerError, match="ValueError: cannot load nowhere"):
        worker.load(setup(fault="load"))
    with pytest.raises(WorkerError, match="it died"):
        worker.run(REQUESTS)


def test_a_worker_that_hangs_is_given_up(start):
    worker = start(patience=1.0)
    with pytest.raises(WorkerError, match="no answer within 1 s"):
        worker.load(setup(fault="hang"))


def result(name, rates, *, weights="bf16", firsts=(1, 2), note=""):
    samples = [
        Sample(number, "mixed", 100 / rate, 100, None, tuple(firsts), note)
        for number, rate in enumerate(rates)
    ]
    samples += [
        Sample(number, "single", 10 / rate, 10, 0.25, (3,)) for number, rate in enumerate(rates)
    ]
    return Result(name, name.upper(), weights, {"pkg": "1"}, [2.0], samples)


def test_rates_and_ratios_are_of_medians():
    ours, peer, broken = result("ours", [40, 10, 30]), result("peer", [10, 20]), result("x", [])
    assert Rate.of(ours.of("mixed")) == Rate(pytest.approx(30), pytest.approx(10), 40)
    assert Rate.of([]) is None
    assert ratios([ours, peer, broken], [ours, broken], "mixed") == {
        "ours": {"ours": pytest.approx(1.0)},
        "peer": {"ours": pytest.approx(2.0)},
    }
    assert first_token_seconds(ours.of("single")) == 0.25
    assert first_token_seconds(ours.of("mixed")) is None


def test_a_sample_is_made_of_what_was_asked_and_seen():
    work = workloads.Workload("single", "one", tuple(REQUESTS))
    sample = Sample.of(4, work, Outcome(2.0, [[9, 9, 9, 9], [7, 7]], [0.5, 1.5], "how"))
    assert sample == Sample(4, "single", 2.0, 6, 1.0, (9, 7), "how")
    assert sample.rate == 3.0


def test_who_computes_something_else_agrees_with_nobody():
    results = [
        result("a", [1, 1], firsts=(1, 2)),
        result("b", [1, 1], firsts=(1, 2)),
        result("near", [1, 1], firsts=(1, 5)),
        result("wrong", [1, 1], firsts=(8, 9)),
    ]
    assert agreement(results, "mixed") == {"a": 1.0, "b": 1.0, "near": 0.5, "wrong": 0.0}


def test_the_report_has_every_peer_failed_ones_with_their_reason():
    results = [
        result("ours", [40, 10, 30]),
        result("peer", [10, 20], note="batches of 8"),
        Result("gone", "GONE", "int8", failure="pip ended with 1"),
    ]
    where = report.Circumstances(
        "2026-01-02",
        "A CPU",
        "Linux",
        0.5,
        "python -m x",
        "abc",
        2,
        3,
        90.0,
        {"The mix": "much"},
        "small",
    )
    page = report.markdown(results, ["ours"], where)
    assert "| OURS | 30.0 (10.0-40.0) | 30.0 (10.0-40.0) | 250 ms | 2.0 s | 100% |  |" in page
    assert "| PEER | 15.0 (10.0-20.0) |" in page
    assert "| batches of 8 |" in page
    assert page.count("| PEER | 2.00x |") == 2, "a table for each workload"
    assert "- GONE: pip ended with 1" in page
    found = json.loads(report.as_json(results, where))
    assert found["machine"] == "A CPU"
    assert [len(peer["samples"]) for peer in found["peers"]] == [6, 4, 0]
