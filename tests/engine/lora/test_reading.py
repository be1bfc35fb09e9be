"""Malicious, damaged or incompatible adapters are refused with a precise message."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.engine.lora.adapter import AdapterRegistry
from octavo.engine.lora.config import read_config
from octavo.engine.lora.errors import AdapterError
from octavo.engine.lora.targets import Targets
from octavo.engine.lora.weights import read_adapter
from octavo.engine.models.linear.adapted_layers import Target
from octavo.kernels.low_rank import matrix_at

SIZES = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
TARGETS = Targets(
    {
        f"model.layers.{layer}.self_attn.{name}": Target(4 * layer + i, *SIZES[name])
        for layer in range(2)
        for i, name in enumerate(SIZES)
    },
    torch.bfloat16,
)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(adapter_paths, tmp_path):
    """A copy of an adapter of all attention layers, for damaging."""
    return shutil.copytree(adapter_paths["attention"], tmp_path / "adapter")


def change_config(adapter, **settings):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_tensors(adapter, change):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refusal(adapter):
    with pytest.raises(AdapterError) as refused:
        read_adapter(adapter, TARGETS)
    return str(refused.value)


def test_what_is_read_is_what_peft_saved(adapter):
    read = read_adapter(adapter, TARGETS)
    stored = load_file(adapter / "adapter_model.safetensors")
    for name, target in TARGETS.layers.items():
        down, up, rank, bits = read.records_at(read.matrices.data_ptr())[target.index].tolist()
        assert rank == read.max_rank == 4
        assert np.int64(bits).view(np.float64) == 16 / 4
        a = matrix_at(down, (rank, target.inputs), torch.bfloat16)
        b = matrix_at(up, (rank, target.outputs), torch.bfloat16)
        assert torch.equal(a, stored[f"base_model.model.{name}.lora_A.weight"].bfloat16())
        assert torch.equal(b.t(), stored[f"base_model.model.{name}.lora_B.weight"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_weights(adapter, dtype):
    change_tensors(adapter, lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    assert read_adapter(adapter, TARGETS).max_rank == 4


def test_scales_follow_patterns(adapter):
    change_config(
        adapter,
        rank_pattern={"q_proj": 2, r"layers\.1\..*v_proj": 3},
        alpha_pattern={"q_proj": 6},
        use_rslora=True,
    )
    config = read_config(adapter)
    layer = "model.layers.1.self_attn."
    assert [config.rank_of(layer + name) for name in ("q_proj", "v_proj", "k_proj")] == [2, 3, 4]
    assert config.scale_of(layer + "q_proj") == pytest.approx(6 / 2**0.5)
    assert config.scale_of(layer + "k_proj") == pytest.approx(16 / 2)
    assert config.rank_of("model.layers.0.self_attn.my_q_proj") == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is 'True', which Octavo does not apply: DoRA scales"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"brand_new_setting": 3}, "brand_new_setting is '3'"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 257}, "r must be an integer from 1 to 256; got '257'"),
        ({"r": 0}, "r must be an integer"),
        ({"r": True}, "r must be an integer"),
        ({"r": 8}, r"lora_A of .*k_proj has shape \[4, 64\]; the model and rank 8"),
        ({"lora_alpha": "high"}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number of at most 1,000,000"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 4}}, "no regular expression"),
        ({"alpha_pattern": {"(a|a)+z": 4}}, "may take too long to match"),
        ({"alpha_pattern": {".*.*.*.*z": 4}}, "may take too long to match"),
    ],
)
def test_configs_that_are_not_applied(adapter, settings, message):
    change_config(adapter, **settings)
    with pytest.raises(AdapterError, match=message):
        read_adapter(adapter, TARGETS)


def test_settings_that_are_off_do_not_matter(adapter):
    change_config(adapter, use_dora=False, brand_new_setting=None, arrow_config={}, bias="none")
    assert read_adapter(adapter, TARGETS).max_rank == 4


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{Q}.lora_A.weight", torch.full((4, 64), torch.nan), "q_proj.lora_A.weight has NaN"),
        (f"{Q}.lora_B.weight", torch.full((64, 4), torch.inf), "q_proj.lora_B.weight has NaN"),
        (f"{Q}.lora_A.weight", torch.full((4, 64), 3.4e38), "too large for bfloat16"),
        (f"{Q}.lora_B.weight", torch.zeros(65, 4), r"needs? \[64, 4\]; the adapter was made for"),
        (f"{Q}.lora_B.weight", torch.zeros(64), "is no matrix"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 64, dtype=torch.int32), "is I32; it must be F32"),
        (f"{Q}.lora_magnitude_vector", torch.zeros(64), "lora_magnitude_vector is not a matrix"),
        ("base_model.model.lm_head.base_layer.weight", torch.zeros(9, 9), "save_embedding_layers"),
        (f"{Q[:-6]}x_proj.lora_A.weight", torch.zeros(4, 64), "x_proj, which is no linear layer"),
    ],
)
def test_tensors_that_do_not_fit(adapter, name, tensor, message):
    change_tensors(adapter, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(AdapterError, match=message):
        read_adapter(adapter, TARGETS)


def test_a_matrix_without_the_other(adapter):
    change_tensors(adapter, lambda tensors: tensors.pop(f"{Q}.lora_B.weight"))
    assert "lora_B of model.layers.0.self_attn.q_proj is missing" in refusal(adapter)


def test_pickles_are_not_opened(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    assert "adapter_model.bin is a pickle, which can run code" in refusal(adapter)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_weights(adapter, kept):
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "truncated" in refusal(adapter)


def test_other_damage(adapter):
    file = adapter / "adapter_model.safetensors"
    for content in (b"\xff" * 64, b"\x02" + bytes(7) + b"{}", file.read_bytes() + b"more"):
        file.write_bytes(content)
        assert str(file) in refusal(adapter)
    (adapter / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refusal(adapter)
    (adapter / "adapter_config.json").unlink()
    assert "is not an adapter in peft's format" in refusal(adapter)
    assert "is not an adapter in peft's format" in refusal(adapter / "absent")


def test_configs_that_would_hold_up_a_reader(adapter):
    file = adapter / "adapter_config.json"
    file.write_text("[" * 100_000)
    assert "is not an adapter in peft's format" in refusal(adapter)
    file.write_text(" " * (1 << 20) + "{}")
    assert "has more than 1048576 bytes" in refusal(adapter)
    file.unlink()
    os.mkfifo(file)
    assert "is no regular file" in refusal(adapter)


def test_names_are_taken_once(adapter):
    registry = AdapterRegistry(TARGETS, ["base", "alias"])
    registry.add(registry.read("mine", adapter))
    for name in ("mine", "base", "alias"):
        with pytest.raises(AdapterError, match="is taken"):
            registry.add(registry.read(name, adapter))
    assert registry.remove("mine") is not None
    assert registry.remove("mine") is None
    assert list(registry) == []
