"""The step compiled in the engine's process, as on a GPU, gives the model's outputs."""

import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs
from transformers import GPTNeoXConfig, Qwen2Config

from octavo.common import resources
from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation import jit
from octavo.engine.compilation.capture import EXAMPLE_ROWS, EXAMPLE_TOKENS, example
from octavo.engine.compilation.jit import JitForward
from octavo.engine.compilation.load_forward import LoadedForward, compiled_for_gpu
from octavo.engine.execution.graph_sizes import step_sizes
from octavo.engine.metrics import EngineMetrics
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear import fuse_linears as fuse_module
from octavo.engine.models.linear import packed_linear
from octavo.engine.models.linear.fuse_linears import FusedPart, fuse_linears
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization.calibration import BLOCK_SIZE
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.models.test_architectures import SMALL, save
from tests.engine.one_prompt import logits
from tests.engine.stepper import Stepper

PROMPTS = ([7, 8, 9], list(range(3, 40)), [5], [11] * 20, [13, 14])


@pytest.fixture
def never_again(monkeypatch):
    """Make a step fail, instead of running uncompiled, if it does not match what was compiled."""
    set_stance = torch.compiler.set_stance

    def fail_on_recompile(stance):
        assert stance in {"eager_on_recompile", "fail_on_recompile"}
        return set_stance("fail_on_recompile")

    monkeypatch.setattr(torch.compiler, "set_stance", fail_on_recompile)


@pytest.fixture
def unpacked(monkeypatch):
    """Leave linear layers as on a GPU."""
    monkeypatch.setattr(packed_linear, "pack_linears", lambda _: None)


@pytest.fixture
def as_on_a_gpu(monkeypatch, never_again, unpacked):
    """Make a CPU engine compile as on a GPU."""

    def load_forward(settings, model, _world):
        loaded = load(model, dtype="float32", device="cpu", block_size=settings.block_size)
        fuse_linears(loaded.model)
        step = JitForward(EagerForward(loaded.model), loaded.device)
        return LoadedForward(
            loaded.shape, loaded.dtype, loaded.cache_dtype, None, loaded.device, step
        )

    monkeypatch.setattr("octavo.engine.startup.load.load_forward", load_forward)
    # One token runs alone, uncompiled.
    monkeypatch.setattr("octavo.engine.execution.executor.Executor.warm_up", lambda *_: None)


def run(model, *, recorded=False):
    settings = {"num_blocks": 64, "swap_space": 0, "compile": "off", "max_num_seqs": 6}
    stepper = Stepper(build(EngineSettings(model=str(model), dtype="float32", **settings)))
    if recorded:
        stepper.parts.executor.record_graphs(step_sizes(6, 0, 512), 128, lambda work: work)
    groups = [
        stepper.submit(prompt, 2 + 2 * i, eos=[2], min_tokens=2 + 2 * i)
        for i, prompt in enumerate(PROMPTS)
    ]
    stepper.run()
    return [group.sequences[0].token_ids for group in groups]


@pytest.mark.parametrize(
    ("quota", "given", "expected"),
    [(2.5, None, 2), (0.5, None, 1), (math.inf, None, 32), (64.0, None, 32), (2.0, "32", 32)],
)
def test_a_quota_limits_the_compilers(monkeypatch, quota, given, expected):
    monkeypatch.setattr(resources, "cpu_quota", lambda: quota)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if given:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", given)
    with jit.inductor.patch(compile_threads=32):
        jit.limit_compilers()
        assert jit.inductor.compile_threads == expected


@pytest.mark.slow
def test_an_engine_draws_the_same_tokens_and_never_compiles_again(tiny_model, request):
    expected = run(tiny_model)
    request.getfixturevalue("as_on_a_gpu")
    assert run(tiny_model, recorded=True) == expected


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen2Config(**SMALL), id="biases", marks=pytest.mark.slow),
        pytest.param(
            GPTNeoXConfig(**{**SMALL, "hidden_size": 128}),
            id="partial rotary",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("never_again", "unpacked")
def test_its_logits_are_the_models_but_in_float32(config, tmp_path):
    save(config, tmp_path)
    loaded = load(str(tmp_path), dtype="bfloat16", device="cpu", block_size=BLOCK_SIZE)
    tokens = torch.randint(1, 500, (1, 37), generator=torch.Generator().manual_seed(2))
    inputs = tokens, torch.arange(37)[None], torch.tensor([35, 36, 0])
    step = EagerForward(loaded.model)
    expected = logits(step, loaded.shape, inputs)
    fuse_linears(loaded.model)
    joined = logits(step, loaded.shape, inputs)
    compiled = logits(JitForward(step, loaded.device), loaded.shape, inputs)
    assert joined.dtype == compiled.dtype == torch.float32
    assert not torch.equal(joined, joined.bfloat16().float())
    for found in joined, compiled:
        assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.slow  # compiles one size after another until refused
def test_what_is_compiled_for_one_size_alone_is_not_used(tiny_model, monkeypatch):
    loaded = load(str(tiny_model), dtype="float32", device="cpu", block_size=BLOCK_SIZE)
    step, given = EagerForward(loaded.model), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, **options: given(step, **options | {"dynamic": False})
    )
    with capture_logs() as logs:
        assert compiled_for_gpu(step, loaded.device, loaded.check) is step
    assert "recompil" in logs[0]["error"]


def test_a_compiled_step_that_computes_something_else_is_not_used(tiny_model, monkeypatch):
    loaded = load(str(tiny_model), dtype="float32", device="cpu", block_size=BLOCK_SIZE)
    step = EagerForward(loaded.model)

    def negated(step, device):
        return lambda *inputs: -step(*inputs)

    monkeypatch.setattr(jit, "JitForward", negated)
    with capture_logs() as logs:
        assert compiled_for_gpu(step, loaded.device, loaded.check) is step
    assert "self-check failed: alone" in logs[0]["error"]


@pytest.mark.usefixtures("unpacked")
def test_layers_of_the_same_input_are_fused(tiny_model):
    model = load(str(tiny_model), dtype="float32", device="cpu", block_size=BLOCK_SIZE).model
    fuse_linears(model)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, FusedPart)
    assert attention.q_proj.shared is attention.k_proj.shared is attention.v_proj.shared
    assert attention.q_proj.shared.layer.weight.shape == (64 + 32 + 32, 64)


@pytest.mark.usefixtures("unpacked")
def test_layers_are_freed_as_they_are_fused(tiny_model, monkeypatch):
    model = load(str(tiny_model), dtype="float32", device="cpu", block_size=BLOCK_SIZE).model
    layers = [weakref.ref(each) for each in model.modules() if isinstance(each, torch.nn.Linear)]
    fuse, left = fuse_module.fuse, []

    def counted(*given):
        left.append(sum(layer() is not None for layer in layers))
        fuse(*given)

    monkeypatch.setattr(fuse_module, "fuse", counted)
    fuse_linears(model)
    assert len(left) == 4
    assert left == sorted(set(left), reverse=True)


class Small(torch.nn.Module):
    """A model that is compiled at once."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)

    def forward(self, input_ids, logits_to_keep, **_):
        return SimpleNamespace(logits=self.embedding(input_ids)[:, logits_to_keep])


def test_steps_that_run_uncompiled_are_counted_and_logged(monkeypatch):
    """Capture decides which rows these are, so nothing else is compiled."""
    given, other = torch.compile, {"dynamic": False, "backend": "eager"}
    monkeypatch.setattr(torch, "compile", lambda step, **options: given(step, **options | other))
    monkeypatch.setattr("octavo.engine.compilation.jit.OTHER_SIZES", ())
    device = torch.device("cpu")
    step = JitForward(EagerForward(Small()), device)
    loaded = LoadedForward(None, torch.float32, torch.float32, None, device, step)
    metrics = EngineMetrics()

    def run(tokens):
        with torch.inference_mode(), attending(DryRun()):
            step(*example(device, tokens, min(tokens, EXAMPLE_ROWS)))
        batch = SimpleNamespace(num_sequences=0, num_tokens=tokens)
        metrics.observe_step(batch, 0.1, compiled=loaded.compiled, eager_steps=loaded.eager_steps)
        sample = metrics.registry.get_sample_value
        return sample("octavo_engine_eager_steps_total"), sample("octavo_engine_compiled")

    with capture_logs() as logs:
        found = [run(tokens) for tokens in (EXAMPLE_TOKENS, 1, EXAMPLE_TOKENS, *[7] * 10)]
    assert found[:3] == [(0, 1), (1, 0), (1, 1)]
    assert found[3:] == [(count, 0) for count in range(2, 12)]
    assert [(entry["tokens"], entry["steps"]) for entry in logs] == [(7, 1), (7, 10)]


class Capricious(torch.nn.Module):
    """A model whose control flow depends on tensors' values."""

    def forward(self, input_ids, **_):
        return input_ids if input_ids.sum() > 0 else -input_ids


def test_a_model_that_cannot_be_captured_runs_as_it_is():
    step = EagerForward(Capricious())
    assert compiled_for_gpu(step, torch.device("cpu"), lambda _: None) is step
