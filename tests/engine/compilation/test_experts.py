"""Mixtures of experts: compiled they are what they are eager, or are not compiled."""

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig

from octavo.common.models.cache import cache_dir
from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.compilation import Recipe, artifact, background, export, locate
from octavo.engine.compilation.capture import capture
from octavo.engine.compilation.experts import FALLBACK, call_grouped_products
from octavo.engine.compilation.export import UncallableOperatorError, compile_graph
from octavo.engine.models.load_model import load
from octavo.engine.models.step import EagerStep
from tests.engine.compilation.test_compilation import check, engine, outputs
from tests.engine.models.quantization.checkpoints import packers
from tests.engine.models.quantization.checkpoints.quantize import quantize
from tests.engine.random_model import save_random_model


def saved(path, **options):
    config = Qwen3MoeConfig(
        **options,
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    save_random_model(config, path, std=0.1)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """Experts that the kernels do not compute."""
    return saved(tmp_path_factory.mktemp("experts"), hidden_act="mish")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_captured_step_calls_nothing_in_python(unknown, dtype):
    loaded = load(str(unknown), dtype=dtype, device="cpu", block_size=16)
    step = EagerStep(loaded.model)
    exported = capture(step, loaded.device)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count(FALLBACK) == 4, "otherwise there is nothing to replace"
    call_grouped_products(exported.graph)
    exported.graph_module.recompile()
    assert FALLBACK not in {str(node.target) for node in exported.graph.nodes}
    tokens = torch.randint(512, (1, 40), generator=torch.Generator().manual_seed(0))
    given = tokens, torch.arange(40)[None], torch.arange(40)
    with torch.inference_mode(), attending(DryRun()):
        expected = step(*given)
        found = exported.module(check_guards=False)(*given)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "dtype", "quantization", "tolerance"),
    [
        ("unknown", "float32", "none", 1e-3),
        ("model", "float32", "none", 1e-3),
        ("model", "bfloat16", "none", 0.05),
        ("model", "bfloat16", "int8", 0.05),
    ],
)
def test_experts_are_compiled(request, kind, dtype, quantization, tolerance, tmp_path, monkeypatch):
    path = request.getfixturevalue(kind)
    expected = outputs(engine(path, "off", dtype, quantization))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    compiled = engine(path, "wait", dtype, quantization)
    assert compiled.parts.executor.compiled
    check(outputs(compiled), expected, tolerance)


def test_mxfp4_is_translated(tmp_path, monkeypatch):
    """The C function tells it from other 4-bit weights."""
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=None,
    )
    path = tmp_path / "model"
    save_random_model(config, path, std=0.1)
    quantize(path, {"quant_method": "mxfp4"}, packers.mxfp4)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    for module in (artifact, background, export):
        monkeypatch.setattr(module, "has_compiler", lambda: False)
    expected = outputs(engine(path, "off", "bfloat16", "none"))
    recipe = Recipe(str(path), "bfloat16", "none", 16)
    made = locate(recipe)
    made.path.mkdir(parents=True)
    export.compile_step(recipe, made.path, tmp_path)
    stepper = engine(path, "auto", "bfloat16", "none")
    assert stepper.parts.executor.compiled
    check(outputs(stepper), expected, 0.05)


@torch.library.custom_op("tests::only_in_python", mutates_args=())
def only_in_python(x: torch.Tensor) -> torch.Tensor:
    return x + 1


only_in_python.register_fake(torch.empty_like)


class Caller(torch.nn.Module):
    def forward(self, x):
        return only_in_python(x) * 2


@pytest.mark.slow  # for the C++ compiler
def test_what_a_library_cannot_call_is_refused_as_it_is_compiled(tmp_path):
    exported = torch.export.export(Caller(), (torch.ones(3),))
    (tmp_path / "result").mkdir()
    with pytest.raises(UncallableOperatorError, match="tests::only_in_python"):
        compile_graph(exported, tmp_path / "result", tmp_path)
