"""A GGUF file's attention settings reach the config, or the file is refused."""

import numpy as np
import pytest
import torch
from gguf import RopeScalingType
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.gguf_conversion.config import complete_config
from octavo.engine.models.resolve_or_convert import resolve
from tests.common.models import tiny_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))


def rotary(rope=None):
    """Return transformers' rotary embedding of the tiny model."""
    config = tiny_gguf.make_model().config
    if rope is not None:
        config.rope_parameters = rope
    return LlamaRotaryEmbedding(config)


def add_llama3(writer):
    """Return the factors as llama.cpp's converter writes them."""
    factors = rotary().inv_freq / rotary(LLAMA3).inv_freq
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def add_linear(writer):
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def add_yarn(writer):
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


@pytest.mark.parametrize(
    ("add", "rope"),
    [
        (add_llama3, LLAMA3),
        (add_linear, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        (lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0), None),
        (add_yarn, YARN),
    ],
    ids=["llama3", "linear", "old linear", "yarn"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_scaling_of_a_file(tmp_path, add, rope, packed):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", add=add)
    path = resolve(str(file), packed=packed)
    own = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).model.rotary_emb
    expected = rotary(rope or {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    torch.testing.assert_close(own.inv_freq, expected.inv_freq)
    assert own.attention_scaling == pytest.approx(expected.attention_scaling)
    assert not own.inv_freq.allclose(rotary().inv_freq)


def test_factors_that_no_config_has_are_refused(tmp_path):
    def add(writer):
        writer.add_tensor("rope_freqs.weight", np.array([1, 3] * 8, np.float32))

    file = tiny_gguf.write(tmp_path / "tiny.gguf", add=add)
    with pytest.raises(UnsupportedModelError, match=r"tiny.gguf cannot be served: its factors of"):
        resolve(str(file))


def test_factors_of_one_change_nothing(tmp_path):
    def add(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))

    path = resolve(str(tiny_gguf.write(tmp_path / "tiny.gguf", add=add)))
    own = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).model.rotary_emb
    assert own.inv_freq.equal(rotary().inv_freq)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            "'longrope', which Octavo does not read: use a file with linear",
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.yarn_ext_factor": 0.5,
            },
            r"does not read its field rope\.scaling\.yarn_ext_factor",
        ),
        ({"attention.key_length": 64, "rope.dimension_count": 32}, "32 of a head's 64 dimensions"),
    ],
)
def test_fields_that_are_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        complete_config(LlamaConfig(), "llama", fields)


def test_heads_are_as_wide_as_the_file_says():
    config = Qwen3Config(head_dim=128)
    complete_config(config, "qwen3", {"attention.key_length": 64})
    assert config.head_dim == 64


@pytest.mark.parametrize(
    ("made", "architecture", "layers", "scalar"),
    [
        (Gemma2Config, "gemma2", 42, 128),
        (Gemma2Config, "gemma2", 46, 144),
        (Gemma3TextConfig, "gemma3", 34, 128),
        (Gemma3TextConfig, "gemma3", 62, 144),
    ],
)
def test_scale_of_attention_is_gemma_s(made, architecture, layers, scalar):
    config = made(num_hidden_layers=layers, hidden_size=4608, num_attention_heads=32)
    fields = {"attention.key_length": 128, "final_logit_softcapping": 20.0}
    complete_config(config, architecture, fields)
    assert config.query_pre_attn_scalar == scalar
    assert config.final_logit_softcapping == 20


def test_only_layers_of_the_whole_context_are_scaled():
    config = Gemma3TextConfig()
    fields = {
        "attention.key_length": 256,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 2e4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    complete_config(config, "gemma3", fields)
    whole = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    near = {"rope_type": "default", "rope_theta": 2e4}
    assert config.rope_parameters == {"full_attention": whole, "sliding_attention": near}


def test_phi3_rotates_a_part_with_two_lists_of_factors():
    short, long = (np.linspace(1, most, 24, dtype=np.float32) for most in (2, 30))
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}
    config = Phi3Config(**sizes, pad_token_id=0)
    fields = {
        "rope.dimension_count": 48,
        "rope.freq_base": 10000.0,
        "rope.scaling.original_context_length": 1024,
        "rope.scaling.attn_factor": 1.25,
        "rope_factors_short": short,
        "rope_factors_long": long,
    }
    complete_config(config, "phi3", fields)
    given = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": 1.25,
    }
    expected = Phi3Config(
        **sizes, pad_token_id=0, original_max_position_embeddings=1024, rope_parameters=given
    )
    x = torch.zeros(1, 1, 1)
    for end in (1000, 2000):
        places = torch.arange(end)[None]
        found, wanted = (Phi3RotaryEmbedding(own)(x, places) for own in (config, expected))
        torch.testing.assert_close(found, wanted)
        assert found[0].shape[-1] == 48


@pytest.mark.parametrize(
    ("said", "window"), [({"attention.sliding_window": 2047}, 2047), ({}, None)]
)
def test_phi3_has_the_window_of_its_file(said, window):
    config = Phi3Config(pad_token_id=0, sliding_window=99)
    complete_config(config, "phi3", said)
    assert config.sliding_window == window
    complete_config(config, "phi3", {"attention.sliding_window": 0})
    assert config.sliding_window is None
