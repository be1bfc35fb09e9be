"""Ranks on GPUs whose streams are late compute the same, and no rank waits for its GPU."""

import json
import os
import subprocess
import sys
import uuid

import pytest

from octavo.engine.parallel.meeting import STORE
from octavo.engine.parallel.place import RankPlace
from tests.engine.parallel.harness import save_models

WAITED = 3

pytest.importorskip("triton")


def run(model, folder, *arguments):
    """Run two ranks; return the exit code of rank 1, and what rank 0 printed."""
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    own |= {STORE: str(folder / f"store-{uuid.uuid4()}")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.parallel.lazy_workload", model, *arguments],
            env=os.environ | own | RankPlace(rank, 2, rank, 2).variables(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        if code := processes[1].wait(timeout=300):
            return code, None
        lines = processes[0].communicate(timeout=300)[0].splitlines()
        return code, json.loads(lines[-1]) if lines else None
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    (path,) = save_models(["few key and value heads"], tmp_path_factory.mktemp("models"))
    return path


@pytest.mark.slow
def test_whatever_gpus_are_late_with_the_outputs_are_the_same(model, tmp_path):
    code, at_once = run(model, tmp_path, "1")
    assert code == 0
    assert at_once["swapped"]
    assert run(model, tmp_path, "0") == (0, at_once)
    _, others = run(model, tmp_path, "0", "tokens")
    assert others != at_once


@pytest.mark.slow
def test_a_rank_that_waits_for_its_gpu_is_found(model, tmp_path):
    assert run(model, tmp_path, "0", "waits") == (WAITED, None)
