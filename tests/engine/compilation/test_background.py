"""The compiler's process: what is told of it while it runs, and of its death."""

import signal
import time

import pytest
import torch
from structlog.testing import capture_logs

from octavo.common import resources
from octavo.common.resources import Memory
from octavo.engine.compilation import Compiler, Recipe, load_step
from octavo.engine.compilation.artifact import Artifact
from octavo.engine.compilation.background import estimate_seconds, in_words
from octavo.engine.memory.cache_tensors import default_cache_gib, default_swap_gib

GIB = 1 << 30


def test_its_start_progress_and_death():
    artifact = Artifact(Recipe("/no-such-model", "auto", "none", 16), "compiled/none")
    with capture_logs() as logs:
        compiler = Compiler(artifact, GIB // 4, 3 * GIB)
        progress = compiler.progress
        compiler._process.send_signal(signal.SIGKILL)
        compiler.join()
    assert compiler.progress is None
    assert 0 <= progress.seconds < 60
    assert progress.estimate == estimate_seconds(GIB // 4)
    start, end = logs
    assert start["event"].startswith("compiling the model for this CPU")
    assert (start["about"], start["gib_of_memory"]) == (in_words(progress.estimate), 3.0)
    assert end["log_level"] == "warning"
    assert "the compiler ended early (killed by SIGKILL" in end["error"]


def test_progress_goes_on():
    artifact = Artifact(Recipe("/no-such-model", "auto", "none", 16), "compiled/none")
    compiler = Compiler(artifact, 0, 0)
    first = compiler.progress.seconds
    time.sleep(0.01)
    assert compiler.progress.seconds > first
    compiler._process.kill()
    compiler.join()


@pytest.mark.parametrize(
    ("size", "words"), [(0, "1 minute,"), (GIB // 2, "2 minutes,"), (3 * GIB, "7 minutes,")]
)
def test_estimates_in_words(size, words):
    assert in_words(estimate_seconds(size)).startswith(words)


DEMO, LARGER = int(0.5 * GIB), int(2.9 * GIB)
"""Loaded weights: of the demo model in float32, of 1.5 billion parameters in bfloat16."""
ENGINE_GIB = 0.9
"""Memory of an uncompiled engine (0.5, measured) and its router (0.4, assumed), without weights."""


@pytest.mark.parametrize("limit", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("size", [DEMO, LARGER])
def test_the_defaults_fit_a_container(limit, size, monkeypatch):
    """With the compiler's memory, where it is started; 10% of what is free is left over."""
    used = ENGINE_GIB + size / GIB
    free = limit - used
    if free <= 0:
        pytest.skip("the weights alone do not fit")
    monkeypatch.setattr(resources, "memory", lambda: Memory(limit * GIB, int(free * GIB)))
    compiles = load_step._room_to_compile(size)
    needed = load_step.compiler_bytes(size) if compiles else 0
    cache = default_cache_gib(torch.device("cpu"), 0.9, needed)
    swap = default_swap_gib(needed)
    assert min(cache, swap) > 0.05 * free or (cache, swap) == (4, 2)
    assert used + cache + swap + needed / GIB <= limit - 0.1 * free
