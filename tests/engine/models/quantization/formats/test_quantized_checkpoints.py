"""Quantized checkpoints give the logits of transformers with dequantized weights."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.quantized import METHODS
from octavo.engine.attention.operator import attending
from octavo.engine.models.checks.weight_names import check_weights
from octavo.engine.models.experts.packed_experts import PackedExperts
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.packed_linear import PackedLinear
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization.calibration import step_alone
from octavo.engine.models.quantization.formats import FORMATS
from octavo.engine.models.quantization.formats.block_layers import PackedBlocksLinear
from octavo.engine.models.quantization.int8 import PackedInt8Linear
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.model_report import report
from tests.engine.models.quantization.formats import packers
from tests.engine.models.quantization.formats.quantize import (
    change_json,
    change_tensors,
    quantize,
    reference_logits,
)
from tests.engine.random_model import TINY, save_random_model

OPERATING = Path(__file__).parents[5] / "docs" / "operating.md"
SMALL = TINY | {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
SMALL |= {"max_position_embeddings": 256, "bos_token_id": None, "pad_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4),
    "mixtral": lambda: MixtralConfig(**SMALL, num_experts_per_tok=2, num_local_experts=4),
    "gpt_oss": lambda: GptOssConfig(**SMALL, num_experts_per_tok=2, num_local_experts=4),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [48, 48],
}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(layout, weights, inputs=None):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


W4 = {"num_bits": 4, "strategy": "group", "group_size": 64}
FLOAT8 = {"type": "float", "num_bits": 8}
NIBBLES, BYTES, WIDENED = PackedBlocksLinear, PackedInt8Linear, PackedLinear
CASES = {
    "gptq": (GPTQ, packers.gptq, NIBBLES),
    "gptq symmetric": (GPTQ | {"sym": True}, partial(packers.gptq, symmetric=True), NIBBLES),
    "gptq order": (GPTQ | {"desc_act": True}, partial(packers.gptq, act_order=True), NIBBLES),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1},
        partial(packers.gptq, version=2, size=-1),
        NIBBLES,
    ),
    "gptq 2 bits": (GPTQ | {"bits": 2}, partial(packers.gptq, bits=2), NIBBLES),
    "gptq 8 bits": (GPTQ | {"bits": 8}, partial(packers.gptq, bits=8), WIDENED),
    "gptq groups of 16": (GPTQ | {"group_size": 16}, partial(packers.gptq, size=16), WIDENED),
    "awq": (AWQ, packers.awq, NIBBLES),
    "w4a16": (compressed("pack-quantized", W4), packers.packed, NIBBLES),
    "w4a16 zeros": (
        compressed("pack-quantized", W4 | {"symmetric": False}),
        partial(packers.packed, symmetric=False),
        NIBBLES,
    ),
    "w4a16 order": (
        compressed("pack-quantized", W4 | {"actorder": "group"}),
        partial(packers.packed, act_order=True),
        NIBBLES,
    ),
    "w8a16": (
        compressed("pack-quantized", {"num_bits": 8}),
        partial(packers.packed, bits=8, size=-1),
        WIDENED,
    ),
    "w8a8": (compressed("int-quantized", {}, TOKEN), packers.int8, BYTES),
    "fp8 by output": (
        compressed("float-quantized", FLOAT8, TOKEN | {"type": "float"}),
        packers.fp8,
        WIDENED,
    ),
    "fp8 by tensor": (
        compressed("float-quantized", FLOAT8 | {"strategy": "tensor"}),
        partial(packers.fp8, by="tensor"),
        WIDENED,
    ),
    "fp8 blocks": (FP8, packers.fp8_blocks, WIDENED),
}


@pytest.fixture
def made(tmp_path):
    """Save a tiny quantized model; return its directory and dequantized weights."""

    def make(family, settings, pack):
        path = tmp_path / "model"
        save_random_model(CONFIGS[family](), path, std=0.1)
        exact = quantize(path, settings, pack)
        check_checkpoint(path)
        check_weights(str(path))
        return path, exact

    return make


def served_logits(loaded, tokens):
    """Return the logits of all tokens, from one step with a paged cache."""
    step = step_alone(loaded.shape, len(tokens), loaded.dtype, loaded.device)
    count = torch.arange(len(tokens))
    with attending(step), torch.inference_mode():
        return EagerForward(loaded.model)(tokens[None], count[None], count).float()


def error(found, expected):
    """Return the median token's difference of logits, in standard deviations."""
    spread = (expected - expected.mean(1, keepdim=True)).norm(dim=1)
    return float(((found - expected).norm(dim=1) / spread).median())


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("case", "family"),
    [
        pytest.param(case, family, marks=() if brief else pytest.mark.slow)
        for i, case in enumerate(CASES)
        for j, family in enumerate(("llama", "qwen3", "qwen3_moe"))
        for brief in [i % 3 == j or family == "qwen3_moe"]
    ],
)
def test_served_logits_are_those_of_the_dequantized_weights(made, tmp_path, family, case):
    settings, pack, kind = CASES[case]
    path, exact = made(family, settings, pack)
    tokens = torch.randint(300, (40,), generator=torch.Generator().manual_seed(1))
    config = CONFIGS[family]()
    wide = load(str(path), dtype="float32", device="cpu", block_size=16)
    expected = reference_logits(config, exact, tokens, torch.float32, tmp_path / "reference")
    assert error(served_logits(wide, tokens), expected) < 1e-5
    with capture_logs() as logs:
        narrow = load(str(path), dtype="bfloat16", device="cpu", block_size=16)
    told = next(entry for entry in logs if entry["event"] == "quantized weights")
    # Experts have no 8-bit kernel without calibration, and no kernel that gathers inputs.
    only_linears = kind is BYTES or "order" in case
    as_stored = kind is not WIDENED and not (only_linears and family == "qwen3_moe")
    assert (told["widened_to"] is None) == as_stored
    found = error(served_logits(narrow, tokens), expected)
    # W8A8 rounds inputs to 8 bits; otherwise only bfloat16 rounds.
    assert 1e-4 < found < (0.06 if kind is BYTES else 0.03)
    layers = {type(layer) for layer in narrow.model.modules()}
    assert kind in layers
    experts = [own for own in narrow.model.modules() if isinstance(own, PackedExperts)]
    in_order = kind is NIBBLES and "order" not in case
    assert [own.is_int4 for own in experts] == [in_order] * (2 if family == "qwen3_moe" else 0)


def test_mixtral_has_its_experts_under_other_names(made):
    path, _ = made("mixtral", AWQ | {"modules_to_not_convert": ["gate"]}, packers.awq)
    assert any("block_sparse_moe" in name for name in load_file(path / "model.safetensors"))
    loaded = load(str(path), dtype="bfloat16", device="cpu", block_size=16)
    experts = [own for own in loaded.model.modules() if isinstance(own, PackedExperts)]
    assert [own.is_int4 for own in experts] == [True, True]


def test_mxfp4_experts_run_as_they_are_stored(made, tmp_path):
    path, exact = made("gpt_oss", {"quant_method": "mxfp4"}, packers.mxfp4)
    tokens = torch.arange(1, 41)
    expected = reference_logits(
        CONFIGS["gpt_oss"](), exact, tokens, torch.float32, tmp_path / "reference"
    )
    for dtype, most in (("float32", 1e-5), ("bfloat16", 0.03)):
        with capture_logs() as logs:
            loaded = load(str(path), dtype=dtype, device="cpu", block_size=16)
        told = next(entry for entry in logs if entry["event"] == "quantized weights")
        experts = [own for own in loaded.model.modules() if isinstance(own, PackedExperts)]
        as_stored = dtype == "bfloat16"
        assert [own.is_int4 for own in experts] == [as_stored] * 2
        assert told["as_stored_percent"] == 100 * as_stored
        assert told["widened_to"] == (None if as_stored else dtype)
        assert error(served_logits(loaded, tokens), expected) < most


def test_mxfp4_experts_differ_from_bfloat16_by_roundings_alone(made, tmp_path):
    path, exact = made("gpt_oss", {"quant_method": "mxfp4"}, packers.mxfp4)
    tokens = torch.arange(1, 41)
    expected = reference_logits(
        CONFIGS["gpt_oss"](), exact, tokens, torch.float32, tmp_path / "reference"
    )
    stored, widened = (
        error(
            served_logits(load(str(own), dtype="bfloat16", device="cpu", block_size=16), tokens),
            expected,
        )
        for own in (path, tmp_path / "reference")
    )
    assert stored < 1.2 * widened


@pytest.mark.parametrize(("case", "bits"), [("gptq", 5), ("w8a8", 8), ("fp8 blocks", 16)])
def test_the_report_counts_the_bits_that_kernels_store(made, case, bits):
    settings, pack, _ = CASES[case]
    path, exact = made("llama", settings, pack)
    found = report(EngineSettings(model=str(path), device="cpu", num_blocks=16, dtype="bfloat16"))
    loaded = load(str(path), dtype="bfloat16", device="cpu", block_size=16)
    weights = sum(value.numel() for name, value in exact.items() if "_proj" in name)
    rest = sum(value.numel() for name, value in exact.items() if "_proj" not in name)
    assert abs(found.weights - weights * bits / 8 - rest * 2) < 0.02 * found.weights
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert abs(sum(own.nbytes for own in tensors) / found.weights - 1) < 0.1
    assert found.quantization.split(",")[0].lower() in {"gptq", "compressed-tensors", "fp8"}
    assert list(found.weights_by_quantization) == [found.quantization]


def test_the_report_counts_experts_in_mxfp4(made):
    path, exact = made("gpt_oss", {"quant_method": "mxfp4"}, packers.mxfp4)
    found = report(EngineSettings(model=str(path), device="cpu", num_blocks=16, dtype="bfloat16"))
    experts = sum(value.numel() for name, value in exact.items() if is_stored(name))
    rest = sum(value.numel() for name, value in exact.items() if not is_stored(name))
    assert abs(found.weights - experts * 5 / 8 - rest * 2) < 0.02 * found.weights


def is_stored(name):
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def test_quantization_at_load_is_refused(made):
    path, _ = made("llama", GPTQ, packers.gptq)
    with pytest.raises(ModelError, match=r"already quantized \(GPTQ, 4 bits, groups of 64\)"):
        load(str(path), dtype="bfloat16", device="cpu", block_size=16, quantization="int8")
    with pytest.raises(ModelError, match="already quantized"):
        report(EngineSettings(model=str(path), device="cpu", quantization="int8"))


def test_every_method_has_a_format():
    assert set(FORMATS) == set(METHODS)


def test_the_table_of_formats_is_whole():
    _, _, section = OPERATING.read_text().partition("### Quantized checkpoints")
    table = section.partition("| --- |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows == list(METHODS.values())


BAD_SETTINGS = [
    (GPTQ, {"bits": 3}, "bits 3"),
    (GPTQ, {"bits": None}, "bits None"),
    (GPTQ, {"group_size": "64"}, "group_size '64'"),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ, {"of_next_year": 1}, r"setting of_next_year \(1\), which Octavo does not know"),
    (GPTQ, {"dynamic": {"-:lm_head": {}}}, "dynamic"),
    (AWQ, {"version": "gemv"}, "version 'gemv'"),
    (AWQ, {"zero_point": False}, "zero_point False"),
    (AWQ, {"backend": "llm-awq"}, "backend 'llm-awq'"),
    (FP8, {"fmt": "e5m2"}, "fmt 'e5m2'"),
    (FP8, {"activation_scheme": "static"}, "activation_scheme 'static'"),
    (FP8, {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
    (compressed("pack-quantized", W4 | {"num_bits": 3}), {}, "in group_0, it has num_bits 3"),
    (compressed("nvfp4-pack-quantized", FLOAT8), {}, "format 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", W4), {"transform_config": {"r1": {}}}, "transform_config"),
    (compressed("pack-quantized", W4 | {"group_size": None}), {}, "weights.group_size None"),
    ({"quant_method": "mxfp4", "bits": 4}, {}, "bits"),
]


@pytest.mark.parametrize(("settings", "change", "why"), BAD_SETTINGS)
def test_unknown_settings_are_refused_by_name(tmp_path, settings, change, why):
    save_random_model(CONFIGS["llama"](), tmp_path, std=0.1)
    change_json(tmp_path / "config.json", quantization_config=settings | change)
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        check_weights(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(UnsupportedModelError, match=why):
        load(str(tmp_path), dtype="bfloat16", device="cpu", block_size=16)


LAYER = "model.layers.0.self_attn.k_proj"


def of_nan(value):
    return torch.full_like(value, torch.nan)


BAD_TENSORS = [
    ("gptq", "scales", lambda _: None, "has no scales"),
    ("gptq", "qzeros", lambda _: None, "has no qzeros"),
    ("gptq order", "g_idx", lambda _: None, "has no g_idx"),
    ("gptq order", "g_idx", torch.zeros_like, "g_idx with groups of other sizes"),
    ("gptq order", "g_idx", lambda value: value + 1, "g_idx of groups outside of 0 to 1"),
    ("gptq", "scales", of_nan, "non-finite values in scales"),
    ("gptq", "scales", lambda value: value[:1], r"scales of shape \[1, 64\] instead of \[2, 64\]"),
    ("gptq", "qweight", lambda value: value.float(), "qweight of type F32 instead of I32"),
    ("gptq", "qweight", lambda value: value[:8].clone(), "qzeros of shape|scales of shape"),
    ("gptq", "qzeros", lambda value: value | -1, "zero point 16"),
    ("awq", "qweight", lambda value: value[:60].clone(), "60 inputs, which groups of 64 do not"),
    ("awq", "scales", of_nan, "non-finite"),
    ("w4a16", "weight_scale", lambda _: None, "has no weight_scale"),
    ("w4a16", "weight_shape", lambda value: value + 1, "says that its shape is"),
    ("w4a16 zeros", "weight_zero_point", lambda _: None, "has no weight_zero_point"),
    ("w8a8", "weight_scale", of_nan, "non-finite"),
    ("w8a8", "weight", lambda value: value.to(torch.int32), "weight of type I32 instead of I8"),
    ("fp8 blocks", "weight_scale_inv", lambda _: None, "has no weight_scale_inv"),
    ("fp8 blocks", "weight_scale_inv", lambda value: value[:1].clone(), r"instead of \[2, 3\]"),
    ("fp8 blocks", "weight_scale_inv", of_nan, "non-finite"),
]


@pytest.mark.parametrize(("case", "part", "change", "why"), BAD_TENSORS)
def test_damaged_weights_are_refused(made, case, part, change, why):
    settings, pack, _ = CASES[case]
    path, _ = made("llama", settings, pack)
    name = f"{LAYER}.{part}"
    change_tensors(path, lambda own, value: (own, change(value) if own == name else value))
    with pytest.raises(ModelError, match=why) as caught:
        load(str(path), dtype="bfloat16", device="cpu", block_size=16)
    assert LAYER in str(caught.value)


def test_a_weight_of_another_shape_is_refused(made):
    path, _ = made("llama", GPTQ, packers.gptq)
    change_json(path / "config.json", intermediate_size=256)
    with pytest.raises(ModelError, match="in another shape, such as model"):
        check_weights(str(path))


def test_another_formats_weights_are_refused(made):
    path, _ = made("llama", GPTQ, packers.gptq)
    change_tensors(
        path,
        lambda name, value: (name, value.to(torch.int8) if "embed_tokens" in name else value),
    )
    with pytest.raises(UnsupportedModelError, match="weight of type I8, which is not"):
        load(str(path), dtype="bfloat16", device="cpu", block_size=16)
    change_json(path / "config.json", quantization_config=FP8)
    with pytest.raises(ModelError, match="none has the tensors of that format"):
        load(str(path), dtype="bfloat16", device="cpu", block_size=16)
