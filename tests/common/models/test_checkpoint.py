"""Unsupported checkpoints are refused from their small files alone, without torch."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.engine.models.resolve_or_convert import resolve

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""
LAYER = "model.layers.0.mlp.down_proj"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
BF16 = {f"{LAYER}.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
INT32 = torch.ones(2, 2, dtype=torch.int32)
FP8 = BF16[f"{LAYER}.weight"].to(torch.float8_e4m3fn)


@pytest.fixture
def checkpoint(tmp_path):
    """Write a checkpoint with a config and tensors; return its directory."""

    def write(config=LLAMA, tensors=BF16, **files):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, tmp_path / "model.safetensors")
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def refused(directory, why):
    with pytest.raises(ModelError, match=why) as caught:
        check_checkpoint(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


GPTQ = {"qweight": INT32, "qzeros": INT32.clone(), "scales": torch.ones(2, dtype=torch.float16)}


@pytest.mark.parametrize(
    ("method", "name", "tensors"),
    [
        ("quark", "quark", {f"{LAYER}.{key}": value for key, value in GPTQ.items()}),
        ("bitsandbytes", "bitsandbytes", {f"{LAYER}.weight": INT32.to(torch.uint8)}),
        ("FBGEMM_FP8", "fbgemm_fp8", {f"{LAYER}.weight": FP8, "weight_scale": torch.ones(1, 1)}),
        ("mxfp8", "mxfp8", {"experts.down_proj_blocks": INT32.to(torch.uint8)}),
        ("of_next_year", "of_next_year", {f"{LAYER}.weight": INT32.to(torch.int8)}),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_its_method(checkpoint, method, name, tensors):
    config = LLAMA | {"quantization_config": {"quant_method": method}}
    why = f"is quantized with {name} .*does not serve: use a version in bf16 or .*GPTQ.*GGUF"
    refused(checkpoint(config, tensors), why)
    refused(checkpoint(LLAMA, tensors), "has .* quantized weights, such as .* of type")


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (LLAMA | {"compression_config": {"quant_method": "sparseml"}}, {}),
        (LLAMA | {"text_config": {"quantization_config": {"quant_method": "fp4"}}}, {}),
        (LLAMA | {"quantization_config": {}}, {}),
        (LLAMA, {"quantize_config.json": {"quant_method": "spqr"}}),
        (LLAMA, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}),
    ],
)
def test_quantization_is_found_wherever_it_is_stated(checkpoint, config, files):
    tensors = {f"{LAYER}.weight": FP8}
    refused(checkpoint(config, tensors, **files), "is quantized with")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8", "mxfp4"])
def test_methods_that_the_engine_reads_pass(checkpoint, method):
    tensors = {f"{LAYER}.weight": FP8, f"{LAYER}.weight_scale_inv": torch.ones(1, 1)}
    check_checkpoint(checkpoint(LLAMA | {"quantization_config": {"quant_method": method}}, tensors))


def test_two_statements_must_be_of_one_method(checkpoint):
    config = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    tensors = {f"{LAYER}.weight": FP8}
    files = {"quantize_config.json": {"bits": 4}}
    refused(checkpoint(config, tensors, **files), "quantized with FP8, and quantize_config.* GPTQ")


def test_a_config_that_claims_fp8_over_bf16_weights_is_refused(checkpoint):
    """Check it: transformers ignores some such claims and applies others."""
    config = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    refused(checkpoint(config), "contradicts itself.*quantized with FP8, but they are BF16")


def test_what_is_not_quantized_passes(checkpoint):
    tensors = {f"{LAYER}.attn.bias": INT32.bool(), "tid2eid": INT32, "inv_freq": torch.ones(2)}
    check_checkpoint(checkpoint(LLAMA | {"quantization_config": None}, BF16 | tensors))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, r"an encoder-decoder model \(t5\)"),
        ({"architectures": ["BertForMaskedLM"]}, "fills in masked words and generates no text"),
        ({"architectures": ["OwnRewardModel"]}, "scores answers"),
    ],
)
def test_models_that_generate_no_text_are_refused(checkpoint, config, why):
    refused(checkpoint(config), why)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"],
)
def test_a_git_lfs_pointer_is_told_as_one(checkpoint, name):
    directory = checkpoint(tensors=None if "index" in name else BF16)
    (directory / name).write_text(POINTER)
    refused(directory, f"{name} is a Git LFS pointer, not the file itself: run `git lfs pull`")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("text", "why"), [("{", "is not valid JSON"), ("[]", "no JSON object")])
def test_json_that_cannot_be_read_is_refused(checkpoint, name, text, why):
    refused(checkpoint(**{name: text}), f"{name} .*{why}|{name} has {why}")


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def test_an_adapter_is_refused_with_its_base_model(checkpoint):
    directory = checkpoint(**{"adapter_config.json": ADAPTER})
    refused(directory, "LoRA adapter for owner/base .*merge it.*delete adapter_config.json")
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"LoRA adapter for owner/base .*merge it into its base"):
        resolve(str(directory))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pytorch_model.bin", "is a pickle, which can run code when loaded: convert it"),
        ("model-Q4_K_M.gguf", "give the path of a GGUF file, such as model-Q4_K_M.gguf"),
        ("consolidated.safetensors", "consolidated.safetensors is in a layout"),
        ("README.md", "has no weights: neither model.safetensors"),
    ],
)
def test_a_directory_without_safetensors_is_refused(checkpoint, name, why):
    refused(checkpoint(tensors=None, **{name: ""}), why)


def test_the_checks_need_neither_torch_nor_transformers(checkpoint):
    program = f"""
import sys
from pathlib import Path
from octavo.common.models.checkpoint import check_checkpoint
check_checkpoint(Path({str(checkpoint())!r}))
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
