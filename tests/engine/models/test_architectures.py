"""Every decoder family of transformers runs without code of our own.

Tiny random models, each with a unique feature, match generate().
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Qwen3Config,
    XLNetConfig,
)

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.random_model import TINY, save_random_model
from tests.engine.stepper import Stepper

SMALL = TINY | {"num_hidden_layers": 4, "head_dim": 32, "max_position_embeddings": 256}
SMALL |= {"bos_token_id": None, "pad_token_id": 0}
CONFIGS = {
    "grouped-query heads": LlamaConfig(**SMALL),
    "query and key norms": Qwen3Config(**SMALL),
    "sliding window": MistralConfig(**SMALL, sliding_window=24),
    "soft cap, alternating windows": Gemma2Config(
        **SMALL, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=40
    ),
    "partial rotary, all heads": GPTNeoXConfig(**{**SMALL, "hidden_size": 128}),
    "learned positions": GPT2Config(
        vocab_size=500,
        n_embd=64,
        n_layer=3,
        n_head=2,
        n_positions=256,
        eos_token_id=None,
        bos_token_id=None,
    ),
    "ALiBi, not a power of two": BloomConfig(
        vocab_size=500, hidden_size=96, n_layer=3, n_head=3, eos_token_id=None, bos_token_id=None
    ),
    "ALiBi, scaled and clipped": MptConfig(
        vocab_size=500, d_model=64, n_layers=3, n_heads=2, attn_config={"clip_qkv": 2.0}
    ),
    "rotary embedding in pairs": GPTJConfig(
        vocab_size=500,
        n_embd=64,
        n_layer=3,
        n_head=2,
        n_positions=256,
        rotary_dim=16,
        eos_token_id=None,
        bos_token_id=None,
    ),
}


def save(config, path):
    model = save_random_model(config, path, std=0.15, dtype=torch.float32)
    model.set_attn_implementation("eager")  # before 5.23 the default ignores the soft cap
    return model.eval()


def engine_of(path, **settings):
    settings = {
        "dtype": "float32",
        "num_blocks": 128,
        "swap_space": 0.01,
        "compile": "off",
    } | settings
    return Stepper(build(EngineSettings(model=str(path), **settings)))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_transformers(name, tmp_path):
    model = save(CONFIGS[name], tmp_path)
    engine = engine_of(tmp_path, block_size=8, max_num_batched_tokens=32, max_num_seqs=8)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, 500, (length,), generator=generator).tolist()
        for length in (3, 20, 57, 110)
    ]
    groups = [engine.submit(prompt, 24) for prompt in prompts]
    engine.run()
    for prompt, group in zip(prompts, groups, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert group.sequences[0].token_ids == expected[0].tolist()


def test_what_attention_cannot_do_is_refused_at_start(tmp_path):
    save(XLNetConfig(vocab_size=500, d_model=64, n_layer=2, n_head=4, d_inner=96), tmp_path)
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        engine_of(tmp_path)


def test_weights_that_cannot_be_read_are_refused_at_start(tmp_path):
    save(CONFIGS["grouped-query heads"], tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ModelError, match="is not a safetensors file"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (None, "lacks 1 of the model's weights, such as model.norm.weight"),
        (
            torch.ones(63),
            r"has 1 of .* in another shape, such as model.norm.weight: \[63\] instead of \[64\]",
        ),
    ],
)
def test_weights_that_are_missing_or_misshapen_are_refused_at_start(tmp_path, replacement, why):
    save(CONFIGS["grouped-query heads"], tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    if replacement is not None:
        weights["model.norm.weight"] = replacement
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"^{tmp_path} {why}$"):
        engine_of(tmp_path)


def test_of_tied_weights_one_is_enough(tmp_path):
    save(LlamaConfig(**SMALL, tie_word_embeddings=True), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert engine_of(tmp_path)


def test_a_block_size_that_kernels_lack_is_refused_at_start(tmp_path):
    save(CONFIGS["grouped-query heads"], tmp_path)
    with pytest.raises(UnsupportedModelError, match="block"):
        engine_of(tmp_path, block_size=12)
