"""Architectures are served right or refused: a selection here, all in the sweep."""

import subprocess
import sys

import pytest
import torch

from tests.architectures.entries import entries
from tests.architectures.serve import Outcome, examine

BY_NAME = {entry.name: entry for entry in entries()}
RIGHT = {Outcome.RIGHT}
REFUSED = {Outcome.REFUSED}
EITHER = RIGHT | REFUSED
SEVERAL = {"gpt_oss"}
"""Entries to serve also with parallel outputs, beams and begun outputs, as in the sweep."""


@pytest.fixture
def one_thread():
    """Compute with one thread: synchronizing two would take longer than the tiny model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        pytest.param("llama", RIGHT, id="rotary positions"),
        pytest.param("llama, yarn rope", RIGHT, id="rope scaled once"),
        pytest.param("gpt2", RIGHT, id="learned positions"),
        pytest.param("gemma2", RIGHT, id="soft cap"),
        pytest.param("gemma3_text", RIGHT, id="windows of some layers"),
        pytest.param("mixtral", RIGHT, id="experts"),
        pytest.param("phi3", RIGHT, id="joined projections"),
        pytest.param("qwen2_moe", RIGHT, id="window in the mask alone"),
        pytest.param("gpt_oss", RIGHT, id="attention sinks"),
        pytest.param("llama4_text, chunks", RIGHT, id="chunks, temperature by position"),
        pytest.param("deepseek_v3", RIGHT, id="latent attention"),
        pytest.param("phi3, longrope", EITHER, id="rope that depends on the batch"),
        pytest.param("llama, longrope, long context", RIGHT, id="long rope"),
        pytest.param("roberta", EITHER, id="positions of its own"),
        pytest.param("bart", REFUSED, id="no positions taken"),
        pytest.param("doge", REFUSED, id="computed mask"),
        pytest.param("falcon_h1", RIGHT, id="recurrent state"),
        pytest.param("diffllama", RIGHT, id="attention called twice"),
        pytest.param("mpt", RIGHT, id="ALiBi"),
    ],
)
def test_it_is_right_or_refused(name, allowed, tmp_path):
    finding = examine(BY_NAME[name], tmp_path, several=name in SEVERAL)
    assert finding.outcome in allowed, finding


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_are_right_or_refused():
    command = [sys.executable, "-m", "tests.architectures.sweep"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
