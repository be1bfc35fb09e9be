"""The sizes of real models, and the settings to launch their kernels with.

A model has one layer of each kind here: more layers launch the same kernels. Experts are narrower
than real ones, by a factor that leaves a multiple of 16: kernels know no more of their width.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV2Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

INT4, INT8, FP8 = ({"quantization": name} for name in ("int4", "int8", "fp8"))
FP8_CACHE, FLOAT32 = {"kv_cache_dtype": "fp8"}, {"dtype": "float32"}
ADAPTERS = {"lora": True}


@dataclass(frozen=True)
class RealModel:
    """A model's sizes.

    Attributes:
        name: The model's name.
        config: Its configuration.
        others: Settings of further engines, besides the defaults.
        mxfp4: Whether the checkpoint has its experts in MXFP4.
    """

    name: str
    config: PretrainedConfig
    others: list[dict[str, Any]] = field(default_factory=list)
    mxfp4: bool = False


def _llama(heads: tuple[int, int, int], sizes: tuple[int, int, int], **own: Any) -> dict[str, Any]:
    """Return sizes: query heads, KV heads, head; hidden state, feed-forward layer, vocabulary."""
    return {
        "num_hidden_layers": 1,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
        **dict(zip(("hidden_size", "intermediate_size", "vocab_size"), sizes, strict=True)),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **own,
    }


TIED = {"tie_word_embeddings": True}
WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = [
    RealModel(
        "SmolLM2-135M",
        LlamaConfig(**_llama((9, 3, 64), (576, 1536, 49_152), **TIED)),
        [FLOAT32, FP8_CACHE, INT4, ADAPTERS],
    ),
    RealModel(
        "LLaMA-7B",
        LlamaConfig(**_llama((32, 32, 128), (4096, 11_008, 32_000))),
        [FLOAT32, FP8_CACHE, INT8],
    ),
    RealModel(
        "Llama-3-8B",
        LlamaConfig(**_llama((32, 8, 128), (4096, 14_336, 128_256))),
        [FP8_CACHE, INT4],
    ),
    RealModel(
        "Llama-3-70B, one of four ranks",
        LlamaConfig(**_llama((16, 2, 128), (8192, 7168, 32_064))),
        [INT4],
    ),
    RealModel(
        "Qwen3-8B",
        Qwen3Config(**_llama((32, 8, 128), (4096, 12_288, 151_936))),
        [FP8],
    ),
    RealModel(
        "Qwen3-0.6B",
        Qwen3Config(**_llama((16, 8, 128), (1024, 3072, 151_936), **TIED)),
        [{"dtype": "float16"}, ADAPTERS],
    ),
    RealModel(
        "Qwen3-30B-A3B",
        Qwen3MoeConfig(
            **_llama((32, 4, 128), (2048, 6144, 151_936)),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768 // 4,
            norm_topk_prob=True,
        ),
        [INT4],
    ),
    RealModel(
        "Mistral-7B",
        MistralConfig(**_llama((32, 8, 128), (4096, 14_336, 32_000), sliding_window=4096)),
        [INT4 | FP8_CACHE],
    ),
    RealModel(
        "Gemma-3-270M",
        Gemma3TextConfig(
            **_llama((4, 1, 256), (640, 2048, 262_144), **TIED, **WINDOWS), sliding_window=512
        ),
        [FLOAT32],
    ),
    RealModel(
        "Gemma-3-27B",
        Gemma3TextConfig(
            **_llama((32, 16, 128), (5376, 21_504, 262_144), **TIED, **WINDOWS),
            sliding_window=1024,
        ),
        [FP8_CACHE],
    ),
    RealModel(
        "DeepSeek-V2-Lite",
        DeepseekV2Config(
            **_llama((16, 16, 64), (2048, 10_944, 102_400), num_hidden_layers=2),
            first_k_dense_replace=1,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=64,
            num_experts_per_tok=6,
            n_shared_experts=2,
            moe_intermediate_size=1408 // 8,
        ),
        [FP8_CACHE],
    ),
    RealModel(
        "gpt-oss-20B",
        GptOssConfig(
            **_llama((64, 8, 64), (2880, 2880 // 15, 201_088), **WINDOWS),
            sliding_window=128,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
        [FP8_CACHE],
        mxfp4=True,
    ),
    RealModel(
        "Falcon-H1-7B",
        FalconH1Config(
            **_llama((12, 2, 128), (3072, 12_288, 130_048)),
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_n_groups=1,
            mamba_d_state=256,
        ),
    ),
    RealModel(
        "Mamba-2-2.7B",
        Mamba2Config(
            num_hidden_layers=1,
            hidden_size=2560,
            num_heads=80,
            head_dim=64,
            state_size=128,
            n_groups=1,
            vocab_size=50_288,
            eos_token_id=2,
        ),
    ),
    RealModel(
        "Mamba-2.8B",
        MambaConfig(
            num_hidden_layers=1,
            hidden_size=2560,
            intermediate_size=5120,
            time_step_rank=160,
            state_size=16,
            vocab_size=50_280,
            eos_token_id=2,
        ),
    ),
    RealModel(
        "Qwen3-Next-80B-A3B",
        Qwen3NextConfig(
            **_llama((16, 2, 256), (2048, 5120, 151_936), num_hidden_layers=2),
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=512,
            num_experts_per_tok=10,
            moe_intermediate_size=512 // 16,
            shared_expert_intermediate_size=512,
        ),
    ),
]
