"""A CPU's traced step gives the eager step's outputs, for any number of tokens."""

import threading
import time

import pytest
import torch
from structlog.testing import capture_logs
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from octavo.engine.compilation.trace import trace
from octavo.engine.compilation.traced_forward import TracedForward
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.load_model import load
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.kernels import cpu
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.compilation.engines import check_equal, engine, outputs
from tests.engine.one_prompt import logits
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper, allow_even_tokens

pytestmark = pytest.mark.skipif(cpu.linear is None, reason="this CPU has no kernels")

SIZES = {"vocab_size": 512, "max_position_embeddings": 512, "eos_token_id": None}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(hidden_size=128, intermediate_size=200, **HEADS, **SIZES),
    "mixtral": MixtralConfig(
        hidden_size=128, intermediate_size=64, num_local_experts=4, **HEADS, **SIZES
    ),
    "gpt2": GPT2Config(
        n_embd=128, n_layer=2, n_head=4, vocab_size=512, n_positions=512, bos_token_id=None,
        eos_token_id=None,
    ),
}  # fmt: skip
"""Schemes; most layers of llama fit 4 bits, and the others then have 8."""
WAYS = [
    ("llama", "bfloat16", "none", 0.1),
    ("llama", "bfloat16", "int8", 0.1),
    ("llama", "bfloat16", "int4", 0.1),
    *((name, "float32", "none", 1e-3) for name in CONFIGS),
    ("mixtral", "bfloat16", "int8", 0.1),
]
FAMILIES = ("falcon_h1", "gpt_oss", "deepseek_v3", "bloom")
"""Models with Mamba-2's states and convolutions, sinks, latent attention, and ALiBi."""
SLOW = ("gemma3n_text", "llama4_text, chunks", "qwen3_next", "jamba")
"""Models with shared keys and values, chunks and temperatures by position, the gated delta rule,
and Mamba."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a model's directory; each model is created once."""
    folder = tmp_path_factory.mktemp("models")

    def make(name):
        path = folder / name
        if not path.exists() and name in CONFIGS:
            save_random_model(CONFIGS[name], path, std=0.1)
        elif not path.exists():
            save(next(entry for entry in entries() if entry.name == name), path)
        return path

    return make


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dtype", "quantization", "tolerance"), WAYS)
def test_traced_is_eager(saved, name, dtype, quantization, tolerance):
    check_equal(saved(name), dtype, quantization, tolerance=tolerance)


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_traced_families_are_eager(saved, name):
    check_equal(saved(name), tolerance=1e-3)


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "deepseek_v3"])
def test_traced_is_eager_with_an_fp8_cache(saved, name):
    check_equal(saved(name), kv_cache_dtype="fp8_e4m3", tolerance=0.1)


def test_a_greedy_step_gives_the_logits_greatest(saved):
    """The step itself returns tokens, without logits, if requests need no more."""
    drawn = [
        [token.token_id for tokens in outputs(stepper, **reported) for token in tokens]
        for reported in ({}, {"logprobs": 0})
        for stepper in [engine(saved("llama"), "auto", "bfloat16", "int4")]
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 10


def test_a_greedy_step_gives_the_greatest_that_a_mask_allows(saved):
    drawn = []
    for reported in ({}, {"logprobs": 0}):
        stepper = engine(saved("llama"), "auto", "bfloat16", "int4")
        free, masked = (stepper.submit(range(3, 9), 12, **reported) for _ in range(2))
        allow_even_tokens(masked, 1 << 20)
        stepper.run()
        drawn.append([group.sequences[0].token_ids[6:] for group in (free, masked)])
        forced = [t.token_id for t in stepper.sampled if t.sequence is masked.sequences[0]]
        assert forced
        assert not any(token_id % 2 for token_id in forced)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


@pytest.fixture
def loaded(saved):
    return load(str(saved("llama")), dtype="bfloat16", device="cpu", block_size=16)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("rows", [1, 2])
def test_any_number_of_tokens_and_of_rows(loaded, tokens, rows):
    """Where a dimension is 1, PyTorch calls other operators."""
    eager = EagerForward(loaded.model)
    traced = TracedForward(eager, loaded.shape.vocab_size, loaded.dtype)
    given = torch.arange(tokens)[None] + 3, torch.arange(tokens)[None], torch.arange(rows) % tokens
    found, expected = (logits(step, loaded.shape, given) for step in (traced, eager))
    assert found.shape == expected.shape == (rows, 512)
    assert (found - expected).norm() <= 0.03 * expected.norm()


def test_it_runs_without_the_interpreters_lock(loaded):
    """Otherwise no other thread could receive requests or send tokens meanwhile."""
    step = TracedForward(EagerForward(loaded.model), loaded.shape.vocab_size, loaded.dtype)
    tokens = torch.arange(20_000)[None]
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    try:
        logits(step, loaded.shape, (tokens % 512, tokens, tokens[0, -1:]))
    finally:
        ended = time.perf_counter()
        done.set()
        thread.join()
    assert ended - began > 0.05
    assert sum(began < at < ended for at in ticks) > 10


def refusals(model, **settings):
    """Return an engine that must run eagerly, and the reasons that its log gives for it."""
    given = {"num_blocks": 64, "swap_space": 0, "compile": "auto", **settings}
    with capture_logs() as logs:
        stepper = Stepper(build(EngineSettings(model=str(model), **given)))
    assert not stepper.parts.executor.compiled
    (why,) = (log["why"] for log in logs if log["event"].startswith("the model runs in Python"))
    assert outputs(stepper)
    return why


def test_a_model_that_looks_at_its_data_runs_eagerly(saved):
    assert "depends on the data" in refusals(saved("dbrx"), dtype="float32")


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_traced_step_that_computes_something_else_is_not_used(saved, quantization, monkeypatch):
    given = TracedForward.__call__
    monkeypatch.setattr(TracedForward, "__call__", lambda *inputs: given(*inputs).flip(0))
    why = refusals(saved("llama"), dtype="bfloat16", quantization=quantization)
    assert "self-check failed: alone" in why


def test_a_model_that_computes_something_else_is_refused(saved, monkeypatch):
    """Its trace is as wrong as the model."""
    given = EagerForward.forward
    monkeypatch.setattr(EagerForward, "forward", lambda *inputs: given(*inputs).flip(0))
    with pytest.raises(SelfCheckError, match="alone"):
        engine(saved("llama"), "auto")


def test_weights_are_not_copied(saved):
    """A trace's constants are the model's own tensors."""
    loaded = load(str(saved("llama")), dtype="bfloat16", device="cpu", block_size=16)
    traced = trace(EagerForward(loaded.model), loaded.shape.vocab_size)
    own = {tensor.untyped_storage().data_ptr() for tensor in loaded.model.state_dict().values()}
    kept = sum(
        constant.nbytes
        for constant in traced.constants.values()
        if constant.untyped_storage().data_ptr() not in own
    )
    assert kept < 1 << 12
