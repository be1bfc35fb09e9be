"""Traced mixtures of experts equal eager ones."""

import pytest
from transformers import GptOssConfig, Qwen3MoeConfig

from octavo.engine.compilation.script import GROUPED_PRODUCT
from octavo.engine.compilation.trace import trace
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.load_model import load
from tests.engine.compilation.engines import check_equal
from tests.engine.models.quantization.formats import packers
from tests.engine.models.quantization.formats.quantize import quantize
from tests.engine.random_model import TINY, save_random_model

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def saved(path, **options):
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    save_random_model(Qwen3MoeConfig(**TINY | HEADS | experts, **options), path, std=0.1)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """Experts that the kernels do not support."""
    return saved(tmp_path_factory.mktemp("experts"), hidden_act="mish")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_traced_step_calls_nothing_in_python(unknown, dtype):
    loaded = load(str(unknown), dtype=dtype, device="cpu", block_size=16)
    step = EagerForward(loaded.model)
    traced = trace(step, loaded.shape.vocab_size)
    targets = [str(node.target) for node in traced.graph.nodes]
    assert targets.count(GROUPED_PRODUCT) == 4, "otherwise there is nothing to replace"
    check_equal(unknown, dtype, tolerance=1e-3 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [("float32", "none", 1e-3), ("bfloat16", "none", 0.05), ("bfloat16", "int8", 0.05)],
)
def test_experts_are_traced(model, dtype, quantization, tolerance):
    check_equal(model, dtype, quantization, tolerance=tolerance)


def test_mxfp4_is_traced(tmp_path):
    """The kernel distinguishes it from other 4-bit weights."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    save_random_model(GptOssConfig(**TINY | HEADS | experts), tmp_path, std=0.1)
    quantize(tmp_path, {"quant_method": "mxfp4"}, packers.mxfp4)
    check_equal(tmp_path, "bfloat16", tolerance=0.05)
