"""The translated step, which stands in for the compiled one where there is no C++ compiler."""

import dataclasses
import threading
import time

import pytest
import torch
from structlog.testing import capture_logs
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from octavo.common.models.cache import cache_dir
from octavo.engine.compilation import CompiledStep, Recipe, artifact, background, export, locate
from octavo.engine.compilation.background import estimate_seconds
from octavo.engine.compilation.translated import TranslatedModel
from octavo.engine.compilation.translation import LIBRARY, UntranslatableError, translate
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from octavo.kernels import cpu
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper, allow_even_tokens

PACKED = pytest.mark.skipif(cpu.linear is None, reason="this CPU has no linear kernels")
LENGTHS = (1, 2, 3, 17, 40)
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
STATEFUL = "falcon_h1", "qwen3_next", "jamba"
"""Families that keep states: Mamba-2, gated delta rule, Mamba; all with convolutions."""
ATTENTION = "gpt_oss", "deepseek_v3", "bloom"
SLOW = "gemma3n_text", "llama4_text, chunks"
"""Families with attention sinks, with latent attention, and with ALiBi; families whose layers share
keys and values, and with chunks and temperatures by position."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        save_random_model(config, directory / name, std=0.1)
    for name in (*STATEFUL, *ATTENTION, *SLOW):
        save(next(entry for entry in entries() if entry.name == name), directory / name)
    return directory


@pytest.fixture(scope="module", autouse=True)
def _without_compiler(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").symlink_to(cache_dir() / "kernels")  # compiled when they were imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE_DIR", str(cache))
        for module in (artifact, background, export):
            patch.setattr(module, "has_compiler", lambda: False)
        yield


def make(recipe, scratch):
    """Make a recipe's artifact, as the process in the background does."""
    made = locate(recipe)
    made.path.mkdir(parents=True)
    export.compile_step(recipe, made.path, scratch)
    return made


def engine(model, mode, dtype, quantization="none"):
    settings = {"num_blocks": 64, "swap_space": 0, "compile": mode, "dtype": dtype}
    return Stepper(build(EngineSettings(model=str(model), quantization=quantization, **settings)))


def outputs(stepper, **sampling):
    """Tokens and log-probabilities of prompts of many lengths, one at a time and together."""
    groups = []
    for length in LENGTHS:
        groups.append(stepper.submit(range(3, 3 + length), 6, **sampling))
        stepper.run()
    groups += [stepper.submit(range(7, 7 + length), 6, **sampling) for length in LENGTHS]
    stepper.run()
    drawn = {group.request.request_id: [] for group in groups}
    for draw in stepper.sampled:
        drawn[draw.group.request.request_id].append(draw)
    return list(drawn.values())


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "tolerance"),
    [
        ("llama", "bfloat16", "none", 0.1),
        pytest.param("llama", "bfloat16", "int8", 0.1, marks=[PACKED, pytest.mark.slow]),
        pytest.param("llama", "bfloat16", "int4", 0.1, marks=PACKED),
        ("llama", "float32", "none", 1e-3),
        ("mixtral", "float32", "none", 1e-3),
        pytest.param("mixtral", "bfloat16", "int8", 0.1, marks=[PACKED, pytest.mark.slow]),
        ("gpt2", "float32", "none", 1e-3),
        ("falcon_h1", "float32", "none", 1e-3),
        *((name, "float32", "none", 1e-3) for name in ATTENTION),
        *(pytest.param(name, "float32", "none", 1e-3, marks=pytest.mark.slow) for name in SLOW),
        pytest.param("qwen3_next", "float32", "none", 1e-3, marks=pytest.mark.slow),
        pytest.param("jamba", "float32", "none", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_translated_is_eager(models, tmp_path, name, dtype, quantization, tolerance):
    made = make(Recipe(str(models / name), dtype, quantization, 16), tmp_path)
    assert (made.path / LIBRARY).exists()
    translated = engine(models / name, "auto", dtype, quantization)
    assert translated.parts.executor.compiled
    found = outputs(translated, logprobs=3)
    expected = outputs(engine(models / name, "off", dtype, quantization), logprobs=3)
    for drawn, wanted in zip(found, expected, strict=True):
        for one, other in zip(drawn, wanted, strict=True):
            assert abs(one.logprob.logprob - other.logprob.logprob) < tolerance
            if one.token_id != other.token_id:  # a tie within the tolerance: what follows differs
                assert tolerance > 1e-3
                break


@pytest.fixture(scope="module")
def kept(models, tmp_path_factory):
    """A translated artifact that no test changes."""
    return make(Recipe(str(models / "llama"), "float16", "none", 16), tmp_path_factory.mktemp("s"))


def test_a_greedy_step_gives_the_logits_greatest(kept, models):
    drawn = [
        [token.token_id for tokens in outputs(stepper, **reported) for token in tokens]
        for reported in ({}, {"logprobs": 0})
        for stepper in [engine(models / "llama", "auto", "float16")]
    ]
    assert kept.path.exists()
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 10


def test_a_greedy_step_gives_the_greatest_that_a_mask_allows(kept, models):
    drawn = []
    for reported in ({}, {"logprobs": 0}):
        stepper = engine(models / "llama", "auto", "float16")
        free, masked = (stepper.submit(range(3, 9), 12, **reported) for _ in range(2))
        allow_even_tokens(masked, 1 << 20)
        stepper.run()
        tokens = {group: [] for group in (free, masked)}
        for draw in stepper.sampled:
            tokens[draw.group].append(draw.token_id)
        assert not any(token_id % 2 for token_id in tokens[masked])
        drawn.append(list(tokens.values()))
    assert kept.path.exists()
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_it_says_what_it_costs_and_what_to_do(kept):
    with capture_logs() as logs:
        step = CompiledStep(kept)
    assert step.manifest.translated == "there is no C++ compiler"
    (entry,) = (entry for entry in logs if "not compiled" in entry["event"])
    assert (entry["why"], entry["cost"]) == (step.manifest.translated, artifact.COST)
    assert "install g++" in entry["hint"]


def test_a_compiler_that_is_installed_later_compiles(kept, monkeypatch):
    monkeypatch.setattr(artifact, "has_compiler", lambda: True)
    assert locate(kept.recipe).path != kept.path


def test_the_start_says_what_is_done_and_how_long(kept):
    with capture_logs() as logs:
        compiler = background.Compiler(
            dataclasses.replace(kept, recipe=Recipe("/none", "auto", "none", 16)), 1 << 30, 0
        )
        progress = compiler.progress
        compiler._process.kill()
        compiler.join()
    assert logs[0]["event"] == background.TRANSLATES
    assert progress.estimate < estimate_seconds(1 << 30)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2


@pytest.fixture
def graph():
    return torch.export.export(Doubled(), (torch.ones(2),))


def failing(error):
    def fail(*_):
        raise error

    return fail


def test_what_a_compiler_refuses_is_translated(graph, monkeypatch, tmp_path):
    def compile_partly(_, result, scratch):
        (result / "half.so").touch()
        raise RuntimeError("no Python.h\nthe command was")

    monkeypatch.setattr(export, "has_compiler", lambda: True)
    monkeypatch.setattr(export, "compile_graph", compile_partly)
    made = export.make_library(graph, tmp_path, tmp_path)
    assert made == (LIBRARY, "it cannot be compiled: no Python.h")
    assert [file.name for file in tmp_path.iterdir()] == [LIBRARY]


def test_what_cannot_be_translated_either_fails_with_the_compilers_error(
    graph, monkeypatch, tmp_path
):
    monkeypatch.setattr(export, "has_compiler", lambda: True)
    monkeypatch.setattr(export, "compile_graph", failing(ValueError("no Python.h")))
    monkeypatch.setattr(export, "translate", failing(UntranslatableError("calls Python")))
    with pytest.raises(ValueError, match=r"no Python\.h"):
        export.make_library(graph, tmp_path, tmp_path)


def test_an_operator_in_python_is_refused(tmp_path):
    @torch.library.custom_op("octavo_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    class Calls(torch.nn.Module):
        def forward(self, x):
            return double(x)

    graph = torch.export.export(Calls(), (torch.ones(2),))
    with pytest.raises(UntranslatableError, match=r"octavo_test\.double\.default.* in Python only"):
        translate(graph, tmp_path)


def test_weights_that_cannot_be_saved_are_refused(tmp_path):
    graph = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    graph.state_dict["weight"] = torch.ones(2, 2).to_mkldnn()
    with pytest.raises(UntranslatableError, match="oneDNN's own layout"):
        translate(graph, tmp_path)


def test_it_runs_without_the_interpreters_lock(tmp_path):
    """Or no other thread could receive requests or send tokens meanwhile."""

    class Busy(torch.nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = x @ x / 400
            return x

    translate(torch.export.export(Busy(), (torch.ones(400, 400),)), tmp_path)
    module = TranslatedModel(tmp_path / LIBRARY, torch.float32)._module
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    module(torch.ones(400, 400))
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert sum(began < at < ended for at in ticks) > 10
