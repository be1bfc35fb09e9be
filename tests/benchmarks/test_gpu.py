"""The GPU benchmark tries itself on a CPU, and one part's failure is no other's."""

import json

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kernel_tests
from benchmarks.gpu.parts import PARTS, TEST_SECONDS, Part
from benchmarks.gpu.result import Row


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


def test_the_times_allowed_are_less_than_nine_minutes():
    assert TEST_SECONDS + sum(part.seconds for part in PARTS.values()) < 9 * 60


def test_tests_find_libraries_where_this_process_does(tmp_path, monkeypatch):
    (tmp_path / "carried.py").touch()
    tests = tmp_path / "test_it.py"
    tests.write_text("import carried, kernels\n\ndef test_it():\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kernel_tests, "ENGINE", tests)
    monkeypatch.setattr(kernel_tests, "KERNELS", tests)
    told = kernel_tests.run_tests(60)
    assert (told["passed"], told["failed"], told["stopped"]) == (2, 0, False), told["output"]
