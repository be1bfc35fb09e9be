"""Engines of real models, large and tiny."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.kernels import logits, ops, states
from tests.engine.random_model import TINY
from tests.engine.stepper import Stepper

STOPPING = [2, 7, 11, 30, 41]
"""Tokens that `decided_model` prefers: enough for outputs to end at many lengths."""


@pytest.fixture
def stepper(demo_model):
    """Creates an engine of the demo model in float32 with these settings."""

    def make(**settings):
        settings = {"model": str(demo_model), "dtype": "float32", "swap_space": 0.5} | settings
        return Stepper(build(EngineSettings(**settings)))

    return make


@pytest.fixture(scope="session")
def reference(demo_model):
    """The demo model as transformers runs it, in float32."""
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A two-layer model with random weights, for tests that need no meaningful text."""
    path = tmp_path_factory.mktemp("tiny")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**TINY | heads | {"eos_token_id": 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def decided_model(tmp_path_factory, tiny_model):
    """The tiny model with larger weights, so that its choices are clear."""
    path = tmp_path_factory.mktemp("decided")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    model.lm_head.weight.data[STOPPING] *= 1.6
    model.save_pretrained(path)
    return path


@pytest.fixture
def on_triton(monkeypatch):
    """Uses the CPU as a GPU: attention, states, writes, copies and draws are the Triton kernels."""
    triton = pytest.importorskip("octavo.kernels.triton")
    for module in (ops, logits, states):
        monkeypatch.setattr(module, "find_backend", lambda _: triton)
    monkeypatch.setattr(triton, "check_device", lambda *_: None)
