"""A draft model changes no token, and an identical one drafts no wrong token."""

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from octavo.engine.execution.cuda_graphs import StepGraphs
from octavo.engine.execution.graph_sizes import draft_model_sizes
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from tests.engine.execution.recording import Again
from tests.engine.random_model import save_random_model
from tests.engine.speculation.test_exactness import AMPLE, SCARCE, given, requests
from tests.engine.stepper import Stepper

DRAFTED = 3


@pytest.fixture(scope="module")
def nearly(tmp_path_factory, decided_model):
    """The decided model with some noise; its drafts are often right."""
    path = tmp_path_factory.mktemp("nearly")
    model = AutoModelForCausalLM.from_pretrained(decided_model, dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(decided_model):
    """Run requests, a few new ones in each step; return the engine and each request's outputs."""

    def run(asked, draft_model=None, *, async_scheduling=False, record=None, **settings):
        settings = {"num_blocks": AMPLE, "max_num_batched_tokens": 96} | settings
        if draft_model is not None:
            settings |= {"speculation": "draft", "draft_model": str(draft_model)}
        parts = build(
            EngineSettings(
                model=str(decided_model),
                dtype="float32",
                compile="off",
                block_size=8,
                max_num_seqs=12,
                swap_space=0.1,
                num_speculative_tokens=DRAFTED,
                **settings,
            )
        )
        if record is not None:  # as at startup on a GPU
            executor = parts.scheduler.draft_model._executor
            executor.record_graphs(draft_model_sizes(12, 96), 512, record)
        engine = Stepper(parts, async_scheduling=async_scheduling)
        groups = []
        for prompt, max_tokens, more in asked:
            groups.append(engine.submit(prompt, max_tokens, **more))
            engine.step()
        engine.run()
        if draft_model is not None:
            parts.scheduler.draft_model.check_idle()
        return engine, [given(group, {}) for group in groups]

    return run


@pytest.fixture(scope="module")
def asked():
    return requests(24)


@pytest.fixture(scope="module")
def expected(run, asked):
    return run(asked)[1]


@pytest.mark.parametrize(
    ("preemption", "async_scheduling"), [("swap", False), ("recompute", True), (None, False)]
)
def test_a_model_that_is_often_right(run, asked, expected, nearly, preemption, async_scheduling):
    memory = {} if preemption is None else {"num_blocks": SCARCE, "preemption": preemption}
    engine, outputs = run(asked, nearly, async_scheduling=async_scheduling, **memory)
    assert outputs == expected
    counters = engine.scheduler.counters
    assert counters["drafted_tokens"] > 150
    assert 0.1 < counters["accepted_tokens"] / counters["drafted_tokens"] < 0.95
    if preemption is not None:
        assert counters[f"preemptions_{preemption}"] > 0


def test_the_model_itself_is_always_right(run, asked, expected, decided_model):
    engine, outputs = run(asked, decided_model)
    assert outputs == expected
    counters = engine.scheduler.counters
    assert counters["accepted_tokens"] == counters["drafted_tokens"] > 200


def test_every_step_of_a_recorded_draft_model_is_replayed(
    run, asked, expected, nearly, monkeypatch
):
    again, steps, choose = Again(), [], StepGraphs.choose

    def note(self, inputs):
        size = choose(self, inputs)
        steps.append(size is not None)
        return size

    monkeypatch.setattr(StepGraphs, "choose", note)
    plain, _ = run(asked, nearly)
    engine, outputs = run(asked, nearly, record=again.record)
    assert outputs == expected
    assert engine.scheduler.counters == plain.scheduler.counters
    assert len(steps) == len(again.replayed) > 50
    assert all(steps)


def test_few_blocks_draft_less_and_change_nothing(run, asked, expected, decided_model):
    engine, outputs = run(asked, decided_model, num_blocks=30)
    assert outputs == expected
    assert engine.scheduler.counters["accepted_tokens"] > 50


def test_an_error_of_the_draft_model_ends_no_request(run, asked, expected, nearly, monkeypatch):
    from octavo.engine.execution.draft_model import DraftModel

    calls, compute = [], DraftModel._compute

    def fails(self, *arguments, **more):
        calls.append(self)
        if len(calls) == 20:
            raise RuntimeError("out of memory")
        return compute(self, *arguments, **more)

    monkeypatch.setattr(DraftModel, "_compute", fails)
    engine, outputs = run(asked, nearly)
    assert outputs == expected
    assert len(calls) == 20
    assert 0 < engine.scheduler.counters["drafted_tokens"] < 150


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            LlamaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
            "100 tokens",
        ),
        (
            MambaConfig(vocab_size=500, hidden_size=32, state_size=8, num_hidden_layers=1),
            "keep states",
        ),
    ],
)
def test_models_that_cannot_draft(tmp_path, decided_model, config, why):
    config.eos_token_id = 2
    save_random_model(config, tmp_path, 0.1)
    settings = EngineSettings(
        model=str(decided_model),
        dtype="float32",
        compile="off",
        num_blocks=64,
        speculation="draft",
        draft_model=str(tmp_path),
    )
    with pytest.raises(StartupError, match=why):
        build(settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"speculation": "draft"}, "need each other"),
        ({"speculation": "auto", "draft_model": "demo"}, "need each other"),
    ],
)
def test_settings_that_do_not_fit(settings, why):
    with pytest.raises(ValidationError, match=why):
        EngineSettings(model="demo", **settings)
