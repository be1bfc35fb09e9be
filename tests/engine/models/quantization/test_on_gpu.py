"""Quantized layers as on a GPU, in plain PyTorch on the CPU.

tests/kernels/test_triton_quantized.py compares the kernels with it.
"""

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from octavo.engine.compilation.jit import JitForward
from octavo.engine.lora.adapted_model import adapt
from octavo.engine.models import load_model
from octavo.engine.models.experts.quantized_experts import QuantizedExperts
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.quantized_linear import Fp8Linear, QuantizedLinear
from octavo.engine.models.linear.wide_linear import WideLinear
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization import SCHEMES, experts_on_gpu
from octavo.engine.models.quantization.base import unquantized_shares
from octavo.engine.models.quantization.formats import find_format
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.models.weights_size import weight_bytes
from octavo.kernels import ops
from octavo.kernels.quantized import Numbers, dequantize, make_e2m1, make_weight
from tests.engine.models.quantization.formats import packers
from tests.engine.models.quantization.formats import test_gguf as gguf_files
from tests.engine.models.quantization.formats.quantize import quantize, reference_logits
from tests.engine.models.quantization.formats.test_quantized_checkpoints import (
    AWQ,
    CASES,
    CONFIGS,
    error,
    served_logits,
)
from tests.engine.one_prompt import logits
from tests.engine.random_model import save_random_model

GPU = torch.device("cuda")
TOKENS = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Models are packed as on a GPU, but stay on the CPU."""

    def pack(model, _, __, scheme, checkpoint):
        return load_model._pack_on_gpu(model, scheme, checkpoint, torch.device("cpu"))

    monkeypatch.setattr(load_model, "_pack", pack)
    monkeypatch.setattr(load_model, "check_quantization", lambda *_: None)


def read(path, dtype, quantization="none"):
    return load(str(path), dtype=dtype, device="cpu", block_size=16, quantization=quantization)


def layers_of(model, kind=QuantizedLinear):
    return [layer for layer in model.modules() if isinstance(layer, kind)]


def size_of(model):
    tensors = [*model.parameters(), *model.buffers()]
    return sum(own.nbytes for own in {id(own): own for own in tensors}.values())


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_runs_as_it_is_stored(tmp_path, case):
    settings, pack, _ = CASES[case]
    config = CONFIGS[("llama", "qwen3")[len(case) % 2]]()
    save_random_model(config, tmp_path / "model", std=0.1)
    exact = quantize(tmp_path / "model", settings, pack)
    expected = reference_logits(config, exact, TOKENS, torch.float32, tmp_path / "exact")
    with capture_logs() as logs:
        wide = read(tmp_path / "model", "float32")
    assert error(served_logits(wide, TOKENS), expected) < 1e-5
    told = next(entry for entry in logs if entry["event"] == "quantized weights")
    assert told["as_stored_percent"] == 100
    layers = layers_of(wide.model)
    quantized = sum(value.numel() for name, value in exact.items() if "_proj" in name)
    assert sum(own.num_weights for own in layers) == quantized
    assert {own.order is None for own in layers} == {"order" not in case}
    narrow = read(tmp_path / "model", "bfloat16")
    assert 1e-4 < error(served_logits(narrow, TOKENS), expected) < 0.03
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.bfloat16)
    counted = weight_bytes(plain, "none", GPU, find_format(tmp_path / "model"))
    assert abs(size_of(narrow.model) / counted - 1) < 0.1


EXPERTS = {
    name: CASES[name] for name in ("gptq", "gptq order", "w4a16 zeros", "w8a8", "fp8 blocks")
}
EXPERTS |= {"awq": (AWQ | {"modules_to_not_convert": ["gate"]}, *CASES["awq"][1:])}
EXPERTS |= {"mxfp4": ({"quant_method": "mxfp4"}, packers.mxfp4, None)}
WHOLE = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
"""Sizes without padding in 4 bits, so that memory matches the estimate."""


def mixture(family):
    config = CONFIGS[family]()
    for name in WHOLE.keys() & config.to_dict().keys():
        setattr(config, name, WHOLE[name])
    return config


def saved_mixture(tmp_path, family, case):
    """Save a quantized model; return it as packed for a GPU in float32, and the right logits."""
    settings, pack, _ = EXPERTS[case]
    config = mixture(family)
    save_random_model(config, tmp_path / "model", std=0.1)
    exact = quantize(tmp_path / "model", settings, pack)
    wide = read(tmp_path / "model", "float32")
    expected = reference_logits(config, exact, TOKENS, torch.float32, tmp_path / "exact")
    assert error(served_logits(wide, TOKENS), expected) < 1e-5
    return wide, expected


def check_size(path, loaded, config):
    plain = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    counted = weight_bytes(plain, "none", GPU, find_format(path))
    assert abs(size_of(loaded.model) / counted - 1) < 0.1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "family"),
    [(case, {"awq": "mixtral", "mxfp4": "gpt_oss"}.get(case, "qwen3_moe")) for case in EXPERTS],
)
def test_experts_run_as_they_are_stored(tmp_path, family, case):
    with capture_logs() as logs:
        wide, expected = saved_mixture(tmp_path, family, case)
    told = next(entry for entry in logs if entry["event"] == "quantized weights")
    in_order = "order" not in case
    assert (told["as_stored_percent"] == 100) == in_order
    assert len(layers_of(wide.model, QuantizedExperts)) == 2 * in_order
    narrow = read(tmp_path / "model", "bfloat16")
    assert 1e-4 < error(served_logits(narrow, TOKENS), expected) < 0.03
    check_size(tmp_path / "model", narrow, mixture(family))


@pytest.mark.parametrize("points", [False, True])
def test_experts_whose_scales_have_other_widths_are_joined(points):
    draw = torch.Generator().manual_seed(0)
    weights = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        codes = torch.randint(16, (24, 64), generator=draw).to(torch.uint8)
        scale = torch.rand((24, 2), generator=draw).to(dtype)
        zeros = torch.randint(16, (24, 2), generator=draw) if points else None
        options = {"group": 32, "numbers": Numbers.NIBBLES, "zero_points": zeros}
        weights.append(make_weight(codes, scale, **options))
    joined = experts_on_gpu._joined(weights)
    assert torch.equal(dequantize(joined), torch.cat(list(map(dequantize, weights))))
    other = make_weight(codes, scale, group=64, numbers=Numbers.NIBBLES)
    assert experts_on_gpu._joined([*weights, other]) is None


def test_a_scale_that_kernels_cannot_multiply_leaves_a_weight_as_it_was():
    codes = torch.zeros((2, 32), dtype=torch.uint8)
    assert make_e2m1(codes, torch.tensor([[128], [0]], dtype=torch.uint8)) is not None
    assert make_e2m1(codes, torch.tensor([[129], [0]], dtype=torch.uint8)) is None


@pytest.mark.few(3)
@pytest.mark.parametrize("case", [*gguf_files.FORMATS, "Q4_K_M", "with others"])
def test_a_gguf_file_runs_from_its_blocks(tmp_path, monkeypatch, case):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    family = "qwen2" if case in gguf_files.CASES["qwen2"] else "llama"
    kinds = gguf_files.CASES[family][case]
    file = gguf_files.write(tmp_path / "tiny.gguf", family, kinds, untied=case == "Q8_0")
    expected = gguf_files.transformers_logits(file, TOKENS % 99, torch.float32)
    wide = read(resolve(str(file), packed=True), "float32")
    # Float types other than bfloat16 become bfloat16 in the cache.
    most = 5e-3 if case == "with others" else 1e-5
    assert error(served_logits(wide, TOKENS % 99), expected) < most
    blocks = [own for own in layers_of(wide.model) if own.quantized.numbers != Numbers.E4M3]
    assert len(blocks) >= 2 * 4
    assert any(own.wide for own in blocks), "the head"
    assert read(resolve(str(file), packed=True), "bfloat16")


def test_a_file_in_fp8_is_multiplied_in_fp8(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "has_fp8_products", lambda *_: True)
    settings, pack, _ = CASES["fp8 by output"]
    save_random_model(CONFIGS["llama"](), tmp_path / "model", std=0.1)
    exact = quantize(tmp_path / "model", settings, pack)
    expected = reference_logits(
        CONFIGS["llama"](), exact, TOKENS, torch.float32, tmp_path / "exact"
    )
    loaded = read(tmp_path / "model", "bfloat16")
    assert len(layers_of(loaded.model, Fp8Linear)) == 2 * 4
    assert 0.01 < error(served_logits(loaded, TOKENS), expected) < 0.1


@pytest.mark.parametrize(
    ("scheme", "products", "least", "most"),
    [
        ("int8", False, 1e-3, 0.03),
        ("int4", False, 0.02, 0.3),
        ("fp8", False, 0.01, 0.1),
        ("fp8", True, 0.01, 0.15),
    ],
)
def test_a_model_is_quantized_at_load(tmp_path, monkeypatch, scheme, products, least, most):
    monkeypatch.setattr(ops, "has_fp8_products", lambda *_: products)
    config = CONFIGS["qwen3"]()
    save_random_model(config, tmp_path, std=0.1)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(TOKENS[None]).logits[0]
    loaded = read(tmp_path, "bfloat16", scheme)
    assert least < error(served_logits(loaded, TOKENS), expected) < most
    kind = Fp8Linear if products else QuantizedLinear
    assert len(layers_of(loaded.model, kind)) == 2 * 4 + (scheme == "int4")
    assert bool(layers_of(loaded.model, WideLinear)) == (scheme != "int4")
    assert not unquantized_shares(loaded.model)
    counted = weight_bytes(exact.to(torch.bfloat16), scheme, GPU)
    assert abs(size_of(loaded.model) / counted - 1) < 0.1
    targets = adapt(loaded.model, config, torch.bfloat16)
    assert len(targets.layers) == 2 * 7 + 1


@pytest.mark.parametrize(
    ("scheme", "least", "most"), [("int8", 1e-3, 0.03), ("int4", 0.02, 0.4), ("fp8", 0.01, 0.1)]
)
def test_experts_are_quantized_at_load(tmp_path, scheme, least, most):
    config = mixture("qwen3_moe")
    save_random_model(config, tmp_path, std=0.1)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(TOKENS[None]).logits[0]
    loaded = read(tmp_path, "bfloat16", scheme)
    assert len(layers_of(loaded.model, QuantizedExperts)) == 2
    assert least < error(served_logits(loaded, TOKENS), expected) < most
    assert not unquantized_shares(loaded.model)
    counted = weight_bytes(exact.to(torch.bfloat16), scheme, GPU)
    assert abs(size_of(loaded.model) / counted - 1) < 0.1


def test_every_scheme_is_tried_here():
    assert set(SCHEMES) == {"int8", "int4", "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize("products", [False, True])
def test_a_compiled_step_calls_the_kernels(tmp_path, monkeypatch, products):
    monkeypatch.setattr(ops, "has_fp8_products", lambda *_: products)
    save_random_model(CONFIGS["qwen3"](), tmp_path, std=0.1)
    loaded = read(tmp_path, "bfloat16", "fp8" if products else "int4")
    eager = EagerForward(loaded.model)
    compiled = JitForward(eager, loaded.device)
    inputs = TOKENS[None], torch.arange(len(TOKENS))[None], torch.tensor([39, 7, 0])
    found, expected = (logits(step, loaded.shape, inputs) for step in (compiled, eager))
    assert not compiled.eager_steps
    assert (found - expected).norm() <= 0.03 * expected.norm()
