"""How models are split over ranks, and which are refused."""

import pytest
from transformers import (
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
)

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.sharding.plan import (
    COLUMNS,
    COLUMNS_TRANSPOSED,
    KEYS_VALUES,
    PACKED,
    ROWS,
    ROWS_TRANSPOSED,
    THREE_TRANSPOSED,
    VOCABULARY,
    make_plan,
)

SMALL = {"vocab_size": 500, "hidden_size": 72, "intermediate_size": 144, "num_hidden_layers": 2}
NINE_HEADS = LlamaConfig(**SMALL, num_attention_heads=9, num_key_value_heads=3)


def test_a_layer_has_the_style_of_transformers_plan():
    plan = make_plan(NINE_HEADS, 3)
    assert plan.style_of("model.layers.1.self_attn.q_proj") == COLUMNS
    assert plan.style_of("model.layers.0.self_attn.k_proj") == COLUMNS
    assert plan.style_of("model.layers.0.mlp.down_proj") == ROWS
    assert plan.style_of("model.embed_tokens") == plan.style_of("lm_head") == VOCABULARY
    assert plan.style_of("model.norm") is None


def test_ranks_share_heads_of_keys_and_values_that_are_fewer():
    plan = make_plan(NINE_HEADS, 9)
    assert plan.style_of("model.layers.0.self_attn.k_proj") == KEYS_VALUES
    assert plan.style_of("model.layers.0.self_attn.q_proj") == COLUMNS


def test_what_does_not_divide_is_refused_with_the_sizes_that_fit():
    with pytest.raises(UnsupportedModelError, match=r"9 heads\. Sizes that fit: 3, 9$"):
        make_plan(NINE_HEADS, 2)
    odd = LlamaConfig(**SMALL | {"hidden_size": 64, "intermediate_size": 143})
    with pytest.raises(UnsupportedModelError, match=r"143 parts\. Sizes that fit: none but 1$"):
        make_plan(odd, 2)


def test_experts_are_split_within():
    config = MixtralConfig(
        **SMALL | {"hidden_size": 64}, num_attention_heads=8, num_key_value_heads=2
    )
    plan = make_plan(config, 4)
    assert plan.style_of("model.layers.0.mlp.experts.gate_up_proj") == PACKED
    assert plan.style_of("model.layers.0.mlp.gate") is None
    with pytest.raises(UnsupportedModelError, match=r"has 144 parts|has 8 heads"):
        make_plan(config, 5)


def test_sinks_are_split_by_heads_and_alternating_gates_in_pairs():
    config = GptOssConfig(
        **SMALL | {"hidden_size": 64},
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    plan = make_plan(config, 4)
    assert plan.style_of("model.layers.0.self_attn.sinks") == COLUMNS
    experts = "model.layers.1.mlp.experts"
    assert plan.style_of(f"{experts}.gate_up_proj_bias") == COLUMNS_TRANSPOSED
    assert plan.style_of(f"{experts}.down_proj") == ROWS_TRANSPOSED
    assert plan.style_of(f"{experts}.down_proj_bias") is None
    config.intermediate_size = 6
    with pytest.raises(UnsupportedModelError, match=r"has 6 parts\. Sizes that fit: 2$"):
        make_plan(config, 4)


def test_a_family_without_a_plan_has_its_own_or_is_refused():
    own = make_plan(GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4), 2)
    assert own.style_of("transformer.h.1.attn.c_attn") == THREE_TRANSPOSED
    assert own.divided("transformer.h.1.attn")
    with pytest.raises(UnsupportedModelError, match="'gptj' cannot be split over ranks"):
        make_plan(GPTJConfig(vocab_size=500, n_embd=64, n_layer=2, n_head=4, rotary_dim=8), 2)


def test_a_plan_with_another_style_is_refused():
    config = Olmo2Config(**SMALL | {"hidden_size": 64}, num_attention_heads=8)
    with pytest.raises(UnsupportedModelError, match="'olmo2' cannot be split"):
        make_plan(config, 2)
