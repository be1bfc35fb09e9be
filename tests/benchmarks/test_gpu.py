"""The GPU benchmark runs on a CPU, and a part's failure does not stop the others."""

import contextlib
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kernel_tests, peers
from benchmarks.gpu.kernel_tests import ENGINE, KERNELS, ROOT
from benchmarks.gpu.parts import PARTS, TEST_SECONDS, Part
from benchmarks.gpu.result import Row
from benchmarks.gpu.shapes import LLAMA_3_8B, LLAMA_7B, SMOLLM2, count_layers, make_batch
from benchmarks.gpu.timing import Timer


def run(path, *arguments):
    status = command.main(["--device", "cpu", "--tiny", "--out", str(path), *arguments])
    return status, json.loads((path / "cpu.json").read_text())


def test_all_parts(tmp_path):
    status, report = run(tmp_path)
    assert status == 0
    assert set(report["parts"]) == set(PARTS)
    rows = {row["case"]: row for part in report["parts"].values() for row in part["rows"]}
    assert all(row["seconds"] > 0 for row in rows.values())
    decode = rows["LLaMA-7B 2 x 48"]
    assert decode["moved"] == 2 * 2 * 48 * 32 * 128 * 2  # K and V, sequences, tokens, heads, ...
    assert decode["flops"] == 2 * 2 * 2 * 48 * 32 * 128
    assert decode["error"] < 0.02
    assert any(name.startswith("sdpa") for name in decode["peers"])
    assert rows["copy"]["moved"] == 2 << 20
    assert "one copy" in rows["Llama-3-8B out, 8 blocks anywhere"]["peers"]
    assert "one by one" in rows["2 layers of LLaMA-7B, 2 x 20, greedy"]["peers"]
    drawn = rows["4 x 500 top-k, top-p, min-p"]
    assert drawn["error"] == 0
    assert drawn["peers"]["sorted"] > 0


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    def fail(timer, tiny):
        raise RuntimeError("out of order")

    def pass_(timer, tiny):
        return [Row("fine", 1.0)]

    monkeypatch.setitem(PARTS, "decode", Part(fail, 1))
    monkeypatch.setitem(PARTS, "prefill", Part(pass_, 1))
    status, report = run(tmp_path, "--parts", "decode", "prefill")
    assert status == 1
    assert "out of order" in report["parts"]["decode"]["failure"]
    assert report["parts"]["prefill"]["rows"][0]["case"] == "fine"


def test_without_a_gpu_it_says_what_can_be_done(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main([])
    assert "--device cpu --tiny" in capsys.readouterr().err


def test_the_times_allowed_are_less_than_13_minutes():
    assert TEST_SECONDS + sum(part.seconds for part in PARTS.values()) < 13 * 60


def test_each_table_is_printed_before_the_next_part_runs(tmp_path, monkeypatch, capsys):
    shown = []

    def look(timer, tiny):
        shown.append(capsys.readouterr().out)
        return [Row(f"case {len(shown)}", 1.0)]

    for name in ("decode", "prefill"):
        monkeypatch.setitem(PARTS, name, Part(look, 1))
    run(tmp_path, "--parts", "decode", "prefill")
    assert "case 1" not in shown[0]
    assert "case 1" in shown[1]


def test_every_test_that_needs_a_gpu_is_run():
    tests = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b|\bMARKS\b", path.read_text()) and path != Path(__file__)
    }
    assert tests == {*KERNELS, *ENGINE}


@pytest.mark.slow  # it imports all that an engine does
def test_tests_have_their_fixtures_and_need_no_others():
    """Plan an engine's tests, for the interpreter, which run where the kernels' do."""
    found = kernel_tests.run_file(ENGINE[0], 500, "--setup-plan", TRITON_INTERPRET="1")
    assert "fixtures used: " in found.pop("output")
    assert found == {"passed": 0, "failed": 0, "skipped": 0, "stopped": False}


def test_each_file_gets_its_share_of_the_time_that_is_left(monkeypatch):
    def run_file(file, seconds):
        shares.append(round(seconds))
        return {"passed": 1}

    shares = []
    monkeypatch.setattr(kernel_tests, "run_file", run_file)
    run_tests = kernel_tests.run_tests(700)
    assert list(run_tests) == [*ENGINE, *KERNELS]
    assert shares == [round(700 / (len(run_tests) - done)) for done in range(len(run_tests))]


class Gpu:
    """A fake GPU: a launch takes the host 100 ms, and the kernel runs 1 ms."""

    def __init__(self, monkeypatch):
        self.milliseconds = 0.0
        self._recorded = None
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(SimpleNamespace, replay=self.replay))
        monkeypatch.setattr(torch.cuda, "graph", self.record)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))

    @contextlib.contextmanager
    def record(self, _):
        self._recorded = 0
        self._recording = True
        yield
        self._recording = False

    _recording = False

    def launch(self):
        if self._recording:
            self._recorded += 1
        else:
            self.milliseconds += 100

    def replay(self):
        self.milliseconds += self._recorded


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = self.gpu.milliseconds

    def elapsed_time(self, end):
        return end.at - self.at


def test_kernels_are_timed_without_their_launches(monkeypatch):
    gpu = Gpu(monkeypatch)
    timer = Timer(torch.device("cpu"), runs=3)
    timer.device = torch.device("cuda")

    def work():
        for _ in range(4):
            gpu.launch()

    assert timer.time_recorded(work, calls=4) == pytest.approx(1e-3)
    assert timer.time(work) == pytest.approx(0.4)


def test_each_layer_has_a_cache_of_its_own_as_in_service():
    batch = make_batch(SMOLLM2, [(1, 20), (3, 3)], torch.device("cpu"))
    keys, values = zip(*batch.caches, strict=True)
    layer = keys[0][0].numel()
    assert len({tensor.data_ptr() for tensor in keys + values}) == 2 * SMOLLM2.num_layers
    assert all(key.stride(0) == 2 * SMOLLM2.num_layers * layer for key in keys)
    assert torch.equal(batch.attend(), batch.attend(SMOLLM2.num_layers - 1))


@pytest.mark.parametrize(("free", "layers"), [(80, 32), (40, 16), (1, 1)])
def test_there_are_as_many_layers_as_memory_allows(monkeypatch, free, layers):
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * gib, 80 * gib))
    assert count_layers(LLAMA_7B, 2 * gib, torch.device("cuda")) == layers


@pytest.mark.parametrize(("layout", "tensor_cores"), [(LLAMA_7B, False), (LLAMA_3_8B, True)])
def test_flashinfer_runs_as_it_is_fastest_and_in_every_layer(monkeypatch, layout, tensor_cores):
    seen = []

    class Wrapper:
        def __init__(self, space, order, *, use_tensor_cores):
            assert (order, use_tensor_cores) == ("HND", tensor_cores)

        def plan(self, *_, **__):
            pass

        def run(self, query, caches):
            seen.append(caches[0].data_ptr())

    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    batch = make_batch(layout, [(1, 20)], torch.device("cpu"))
    work, calls = peers._flashinfer(batch)
    work()
    assert calls == len(set(seen)) == layout.num_layers
