"""Latent attention: what the cache keeps, and which modules are recognized."""

import json

import pytest
import torch
from transformers.models.minicpm3 import modeling_minicpm3
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.attention.latent import AbsorbedProducts, Expansion, absorbed_linears
from octavo.engine.attention.packed_latents import PackedProducts
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.kv_scales import measure_kv_scales
from octavo.engine.models.linear import packed_linear
from octavo.engine.models.load_empty import load_empty
from octavo.engine.models.load_model import load
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.model_report import report
from octavo.kernels import cpu
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.architectures.tiny import tiny_config

BY_NAME = {entry.name: entry for entry in entries()}
FAMILIES = (
    *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
    *("longcat_flash", "minicpm3", "youtu"),
)
RANK, ROTATED, VALUE, HEADS = 32, 16, 32, 4
"""Sizes of the tiny models without states."""
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "dtype": "bfloat16",
}


def load_tiny(path, dtype="float32", quantization="none"):
    return load(str(path), dtype=dtype, device="cpu", block_size=16, quantization=quantization)


@pytest.fixture
def minicpm3(tmp_path):
    save(BY_NAME["minicpm3"], tmp_path)
    return tmp_path


def test_deepseek_v3_keeps_576_elements_of_a_token_and_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    settings = EngineSettings(model=str(tmp_path), device="cpu", dtype="bfloat16")
    found = report(settings, 2000 << 30)
    assert found.parameters == pytest.approx(671e9, rel=0.01)
    (group,) = found.groups
    assert (group.kind, group.layers) == ("latent", 61)
    assert group.token_bytes == 61 * (512 + 64) * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_families_keep_latents_alone(name, tmp_path):
    tiny_config(name, BY_NAME[name].overrides).save_pretrained(tmp_path)
    shape = load_empty(str(tmp_path), dtype="float32", device="cpu", block_size=16).shape
    rank = BY_NAME[name].overrides.get("kv_lora_rank", RANK)
    for layer in shape.layers:
        assert (layer.num_heads, layer.num_kv_heads) == (HEADS, 1)
        assert (layer.key_dim, layer.value_dim, layer.latent) == (rank + ROTATED, rank, True)
        assert layer.token_elements == rank + ROTATED


def test_the_cache_has_no_values_and_nothing_beside_keys(minicpm3):
    loaded = load_tiny(minicpm3)
    layout = plan_layout(loaded.shape, 16, torch.float32, torch.float32)
    cache = CacheTensors(
        layout, num_blocks=2, num_swap_blocks=0, dtype=torch.float32, device=torch.device("cpu")
    )
    assert all(layer.values is None for layer in cache.layers)
    assert sum(layer.keys[0].numel() for layer in cache.layers) == cache.device[0].numel()


def test_a_loaded_model_is_without_what_was_absorbed(minicpm3, monkeypatch):
    monkeypatch.setattr(packed_linear, "pack_linears", lambda _: None)  # not parameters there
    loaded = load_tiny(minicpm3)
    attention = loaded.model.model.layers[0].self_attn
    assert attention.kv_b_proj is None
    assert isinstance(attention.octavo_products, PackedProducts)
    empty = load_empty(str(minicpm3), dtype="float32", device="cpu", block_size=16)
    assert loaded.shape.layers == empty.shape.layers
    absorbed = sum(layer.weight.numel() for layer in absorbed_linears(empty.model))
    weights = (sum(w.numel() for w in each.model.parameters()) for each in (loaded, empty))
    assert next(weights) == next(weights) - absorbed


def test_without_a_kernel_products_are_pytorchs(minicpm3, monkeypatch):
    monkeypatch.setattr(cpu, "latents", None)
    loaded = load_tiny(minicpm3)  # the self-check passed
    attention = loaded.model.model.layers[0].self_attn
    assert isinstance(attention.octavo_products, AbsorbedProducts)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("minicpm3", "none"),
        ("minicpm3", "int8"),
        pytest.param("minicpm3", "int4", marks=pytest.mark.slow),
        pytest.param("kimi_linear", "int8", marks=pytest.mark.slow),
    ],
)
def test_the_self_check_passes_in_fewer_bits(name, quantization, tmp_path):
    save(BY_NAME[name], tmp_path)
    loaded = load_tiny(tmp_path, "bfloat16", quantization)
    assert all(layer.latent for layer in loaded.shape.layers)


def test_absorbed_products_are_those_of_keys_and_values():
    torch.manual_seed(0)
    expansion = Expansion("kv_b_proj", key_dim=24, value_dim=40)
    weight = torch.randn(3 * (24 + 40), 16, dtype=torch.float64)
    products = AbsorbedProducts(expansion, weight)
    latents, rotated = torch.randn(5, 16).double(), torch.randn(5, 8).double()
    by_head = (latents @ weight.T).view(5, 3, -1).transpose(0, 1)
    keys = torch.cat([by_head[..., :24], rotated.expand(3, -1, -1)], -1)
    query = torch.randn(3, 2, 24 + 8).double()
    absorbed = products.absorb(query) @ torch.cat([latents, rotated], -1).T
    torch.testing.assert_close(absorbed, query @ keys.transpose(1, 2))
    shares = torch.rand(3, 2, 5).double()
    torch.testing.assert_close(products.expand(shares @ latents), shares @ by_head[..., 24:])


def _scaled(self, kv_nope, k_rot):
    keys, values = EXPAND(self, kv_nope, k_rot)
    return 1.5 * keys, values


def _rotated_first(self, kv_nope, k_rot):
    keys, values = EXPAND(self, kv_nope, k_rot)
    return keys.roll(self.qk_rope_head_dim, -1), values


def _of_its_layer(self, kv_nope, k_rot):
    keys, values = EXPAND(self, kv_nope, k_rot)
    return keys, values * (1 + 0.1 * self.layer_idx)


EXPAND = MiniCPM3Attention.expand_kv


@pytest.mark.parametrize("expand", [_scaled, _rotated_first, _of_its_layer])
def test_what_expands_otherwise_keeps_keys_and_values(expand, minicpm3, monkeypatch):
    monkeypatch.setattr(MiniCPM3Attention, "expand_kv", expand)
    for layer in load_tiny(minicpm3).shape.layers:  # the self-check passed
        assert not layer.latent
        assert (layer.num_kv_heads, layer.value_dim) == (HEADS, VALUE)


def test_what_changes_keys_on_the_way_keeps_keys_and_values(minicpm3, monkeypatch):
    class Interfaces:
        def get_interface(self, *names):
            attend = INTERFACES.get_interface(*names)
            return lambda module, query, key, *others, **options: attend(
                module, query, 1.5 * key, *others, **options
            )

    INTERFACES = modeling_minicpm3.ALL_ATTENTION_FUNCTIONS  # noqa: N806
    monkeypatch.setattr(modeling_minicpm3, "ALL_ATTENTION_FUNCTIONS", Interfaces())
    assert not any(layer.latent for layer in load_tiny(minicpm3).shape.layers)


def test_scales_of_an_fp8_cache_fit_latents(minicpm3):
    loaded = load_tiny(minicpm3)
    scales = measure_kv_scales(loaded.model, loaded.shape, str(minicpm3), torch.float8_e4m3fn)
    assert all(keys > 0 and values == 1.0 for keys, values in scales)


def test_whole_numbers_are_refused(minicpm3):
    with pytest.raises(UnsupportedModelError, match="int8 keeps keys and values"):
        report(EngineSettings(model=str(minicpm3), device="cpu", kv_cache_dtype="int8"))
