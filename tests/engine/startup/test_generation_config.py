"""A model's own defaults are read from its generation_config.json, and checked."""

import json
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from octavo.common.limits import Limits
from octavo.common.models.checkpoint import GENERATION_CONFIG
from octavo.common.models.errors import ModelError
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.generation_config import Defaults, read
from octavo.v1 import sampling_pb2
from tests.plain import budget

LIMITS = Limits(128, 1000, 8, (budget(16, 16),), beam_search=True)
QWEN = {
    "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5,
    "max_new_tokens": 2048, "do_sample": False, "eos_token_id": [2], "num_beams": 4,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """Write a generation_config.json; return its directory."""

    def write(content) -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / GENERATION_CONFIG).write_text(text)
        return tmp_path

    return write


def test_all_that_requests_have_is_read(model):
    expected = sampling_pb2.SamplingParams(
        temperature=0.5, top_k=20, top_p=0.75, min_p=0.25, repetition_penalty=1.5
    )
    with capture_logs() as logs:
        assert read(model(QWEN), LIMITS) == Defaults(expected, 2048)
    (line,) = logs
    assert line["log_level"] == "info"
    assert (line["temperature"], line["max_new_tokens"]) == (0.5, 2048)


def test_neutral_values_are_the_model_s_too(model):
    defaults = read(model({"temperature": 0, "top_k": 0, "min_p": None}), LIMITS)
    assert defaults.sampling.HasField("temperature")
    assert defaults.sampling.HasField("top_k")
    assert not defaults.sampling.HasField("min_p")
    assert defaults.max_tokens is None


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("temperature", -1, "sampling.temperature must be in [0, 100]; got -1"),
        ("temperature", float("nan"), "got nan"),
        ("temperature", True, "sampling.temperature must be a number; got true"),
        ("temperature", "hot", ""),
        ("top_p", 0, "sampling.top_p must be in (0, 1]; got 0"),
        ("min_p", 2, "sampling.min_p must be in [0, 1]; got 2"),
        ("top_k", -1, ""),
        ("top_k", 0.5, ""),
        ("top_k", 1 << 40, ""),
        ("repetition_penalty", 0, "sampling.repetition_penalty must be in (0, 100]; got 0"),
        ("max_new_tokens", 0, "stop.max_tokens must be in"),
    ],
)
def test_a_value_that_no_request_may_have_is_left_out(model, key, value, reason):
    other = "top_k" if key != "top_k" else "top_p"
    with capture_logs() as logs:
        defaults = read(model({key: value, other: 1}), LIMITS)
    assert defaults == Defaults(sampling_pb2.SamplingParams(**{other: 1}))
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["key"] == key
    assert reason in warning["reason"]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_is_refused(model, content):
    with pytest.raises(ModelError, match=GENERATION_CONFIG):
        read(model(content), LIMITS)


def test_a_model_without_the_file(tmp_path):
    with capture_logs() as logs:
        assert read(tmp_path, LIMITS) == Defaults()
    assert logs == []


def test_the_setting_turns_it_off(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    (path / GENERATION_CONFIG).write_text(json.dumps({"temperature": 0.5}))
    settings = {"model": str(path), "num_blocks": 8, "swap_space": 0, "compile": "off"}
    parts = build(EngineSettings(**settings))
    assert parts.defaults.sampling.temperature == 0.5
    parts = build(EngineSettings(**settings, generation_config="none"))
    assert parts.defaults == Defaults()
