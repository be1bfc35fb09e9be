"""The entries of the sweep: every causal-LM architecture of transformers, and some variants."""

from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.tiny import CONTEXT, HEAD_DIM, HEADS, KV_HEADS, LAYERS, WINDOW


@dataclass(frozen=True, slots=True)
class Entry:
    """One tiny model.

    Attributes:
        name: Unique name.
        model_type: A key of transformers' mapping.
        overrides: Settings of its config besides the usual shrinking.
        has_model: Whether transformers can create a model from the config; else only the config is
            saved.
        max_model_len: Value of `--max-model-len`.
    """

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    has_model: bool = True
    max_model_len: int | None = None


SLIDING = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
CONVOLUTION = ["conv", "full_attention"] * 2
OWN_KV_HEADS = {"num_key_value_heads": HEADS}
LATENT_WINDOW = {
    "head_dim": 48,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 48,
    "swa_qk_nope_head_dim": 32,
    "swa_v_head_dim": HEAD_DIM,
}
INDEXED = {
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
}
WIDE_LATENTS = {"kv_lora_rank": 128}
"""For models with states: otherwise latents fit one block, and nothing is preempted."""
SHORT_CONTEXT = CONTEXT // 8
"""Original context of a rope variant: shorter than most prompts."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": WIDE_LATENTS,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "cwm": OWN_KV_HEADS,
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 160, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"text_config": LATENT_WINDOW},
    "dots3_note_text": LATENT_WINDOW,
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma4": {"text_config": {"global_head_dim": 64}},
    "gemma4_assistant": {
        "whole": {
            "text_config": {
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "num_kv_shared_layers": 30,
            }
        },
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": LAYERS,
        },
    },
    "gemma4_text": {"global_head_dim": 64},
    "gemma4_unified": {"text_config": {"global_head_dim": 64}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": LAYERS}},
    "gemma4_unified_text": {"global_head_dim": 64},
    "got_ocr2": {"text_config": {"layer_types": SLIDING}},
    "granitemoehybrid": {"layer_types": LINEAR},
    "kimi_linear": WIDE_LATENTS,
    "laguna": {"layer_types": SLIDING, "num_attention_heads_per_layer": [HEADS] * LAYERS},
    "lfm2": {"layer_types": CONVOLUTION, "full_attn_idxs": [1, 3], "num_hidden_layers": LAYERS},
    "lfm2_moe": {"layer_types": CONVOLUTION},
    "llama4": {"text_config": {"moe_layers": [1, 3]}},
    "llama4_text": {"moe_layers": [1, 3]},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "moshi": {"audio_encoder_config": {"codebook_size": 256}},
    "moss_transcribe_diarize": {"text_config": {"layer_types": SLIDING}},
    "musicgen": {"is_encoder_decoder": True},
    "musicgen_melody": {"is_encoder_decoder": True},
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "num_hidden_layers": LAYERS,
    },
    "smollm3": {"layer_types": SLIDING},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [*["linear_attention"] * 2, "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 64,
        "attention_hidden_size": 256,
    },
    "zamba2": {"attention_head_dim": 64, "attention_hidden_size": 256},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
"""Overrides by model type, where the table of `tiny` does not suffice."""

NO_MODEL = {
    "gemma3n": "needs an image library",
    "gemma4_assistant": "drafts from another model's keys and values",
    "gemma4_unified_assistant": "drafts from another model's keys and values",
    "musicgen": "AutoModelForCausalLM wants its decoder's config",
    "musicgen_melody": "AutoModelForCausalLM wants its decoder's config",
}
"""Reasons why transformers cannot run these models; only their config is saved."""

_PLAIN = {"rope_theta": 10000.0}
_STRETCHED = {**_PLAIN, "original_max_position_embeddings": SHORT_CONTEXT}
_FACTORS = HEAD_DIM // 2
_LONG = {
    "rope_type": "longrope",
    **_STRETCHED,
    "short_factor": [1.0 + i / _FACTORS for i in range(_FACTORS)],
    "long_factor": [3.0 + i for i in range(_FACTORS)],
}
_NO_WINDOW = {"sliding_window": None}
_EVEN_HEADS = {"qk_nope_head_dim": 16, "qk_head_dim": 32}
_ALL_FULL = {
    **_NO_WINDOW,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * LAYERS,
}
VARIANTS = [
    *(Entry(f"{n}, no window", n, _NO_WINDOW) for n in ("mistral", "mixtral", "phi3", "phimoe")),
    *(Entry(f"{n}, no window", n, _ALL_FULL) for n in ("qwen2", "qwen2_moe")),
    Entry("falcon, alibi", "falcon", {"alibi": True, "multi_query": False, "num_kv_heads": HEADS}),
    Entry("falcon, groups", "falcon", {"new_decoder_architecture": True}),
    Entry(
        "llama4_text, chunks",
        "llama4_text",
        OVERRIDES["llama4_text"]
        | {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
    Entry("gemma4_text, heads alike", "gemma4_text", {"global_head_dim": HEAD_DIM}),
    Entry("deepseek_v3, heads alike", "deepseek_v3", _EVEN_HEADS),
    Entry("minimax_m3_vl_text, no sparse", "minimax_m3_vl_text"),
    Entry(
        "llama, linear rope",
        "llama",
        {"rope_parameters": {"rope_type": "linear", **_PLAIN, "factor": 4.0}},
    ),
    Entry(
        "llama, dynamic rope",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", **_PLAIN, "factor": 4.0}},
    ),
    Entry(
        "llama, yarn rope",
        "llama",
        {"rope_parameters": {"rope_type": "yarn", **_STRETCHED, "factor": 8.0}},
    ),
    Entry("llama, longrope", "llama", {"rope_parameters": {**_LONG, "factor": 8.0}}),
    Entry(
        "llama, longrope, long context",
        "llama",
        {  # every request must exceed the original context for transformers to agree
            "rope_parameters": {**_LONG, "factor": 8.0, "original_max_position_embeddings": 16}
        },
        max_model_len=128,  # everything in the cache
    ),
    Entry(
        "llama, llama3 rope",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                **_STRETCHED,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    Entry(
        "phi3, longrope",
        "phi3",
        {"original_max_position_embeddings": SHORT_CONTEXT, "rope_parameters": _LONG},
    ),
    Entry(
        "phimoe, longrope",
        "phimoe",
        {"rope_parameters": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.2}},
    ),
]


def entries() -> list[Entry]:
    """Return all entries, the mapping's first."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    plain = [Entry(n, n, OVERRIDES.get(n, {}), n not in NO_MODEL) for n in names]
    return plain + [entry for entry in VARIANTS if entry.model_type in names]
