"""Create a tiny model with random weights from any config class of transformers."""

import math
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
"""Tokens of a window and of a chunk: most prompts cross several."""
CONTEXT = 192
VOCABULARY = 320
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 32
ROPE_DIM = 16
LAYERS, MOST_LAYERS = 4, 6
GAIN = 1.5
"""Gain of each weight matrix: enough for every token to change the tokens after it."""

_TABLE = f"""
{HIDDEN}: hidden_size n_embd d_model emb_dim embedding_dim word_embed_proj_dim lru_width
    embedding_size input_embedding_size output_embedding_size out_hidden_size vision_output_dim
    projector_input_dim projector_output_dim hidden_size_global adapter_out_dim adapter_in_dim
    adapter_input_size backbone_hidden_size embed_dim pronunciation_embed_dim shape_embed_dim
    input_size
{HEADS}: num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads
    encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
    swa_num_attention_heads index_n_heads linear_num_value_heads linear_num_heads
    num_query_groups
{KV_HEADS}: num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads
    linear_num_key_heads
{HEAD_DIM}: head_dim swa_head_dim attention_head_size d_kv dim_head d_head kv_channels
    q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim linear_head_dim
    o_lora_rank linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim
    mamba_headdim
{HEAD_DIM + ROPE_DIM}: qk_head_dim
{ROPE_DIM}: qk_rope_head_dim rotary_dim mamba_d_state ssm_state_size state_size mamba_dt_rank
    time_step_rank hidden_size_per_layer_input laurel_rank gated_norm_rank adapter_rank
    router_hidden_size hc_lowrank ple_embed_dim prompt_mid_dim block_multiple_of
    num_position_embeddings ffn_round_up_to_multiple_of
{LAYERS}: num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers
    num_decoder_layers num_encoder_layers num_blocks depth num_layers_per_stack
160: intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dff dim_ff d_inner
    ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim
48: moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
    expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_intermediate_size
8: n_routed_experts num_experts num_local_experts moe_num_experts zero_expert_num
    n_mamba_heads mamba_num_heads mamba_n_heads
2: num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k n_group topk_group
    num_expert_group n_groups o_groups max_window_layers sliding_window_pattern
    _sliding_window_pattern global_attn_every_n_layers layer_group_size num_random_blocks
    heads_per_ngram num_codebooks attn_layer_period num_kv_shared_layers
    n_layers_per_attn_res_block num_global_layers split_ngram_parts
1: first_k_dense_replace num_dense_layers moe_layer_start_index attn_layer_offset
    num_nextn_predict_layers mamba_n_groups mamba_ngroups
{WINDOW}: sliding_window sliding_window_size attention_chunk_size local_attention window_size
    attention_window_size local_attention_window_len keep_window_size chunk_size
    mamba_chunk_size index_topk index_block_size local_attn_chunk_length
    lsh_attn_chunk_length rel_extent conf_attention_chunk_size floor_scale
{CONTEXT}: max_position_embeddings n_positions n_ctx max_seq_len max_target_positions
    max_source_positions context_length model_max_length position_bias_max_distance
    image_seq_length log_scaling_n_floor
{VOCABULARY}: vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input
    audio_vocab_size pronunciation_vocab_size shape_vocab_size codebook_size
    encoder_hash_byte_group_vocab ngram_vocab_size_base
"""
"""Small values of a config's settings by name; settings that its class lacks are ignored."""
_SMALL = {
    key: int(value)
    for value, keys in re.findall(r"^(\d+):([^:]*)$", _TABLE, re.MULTILINE)
    for key in keys.split()
}
_FLAGS = {"is_decoder": True, "is_encoder_decoder": False, "use_sliding_window": True}
_NEVER_NONE = {"sliding_window", "num_key_value_heads", "head_dim"}
_INDICES = {"moe_layers", "full_attn_idxs"}  # lists of layer indices
_SWITCHES = {"use_sliding_window": True, "max_window_layers": 2}
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
FIRST_TOKEN = 8
"""Lowest token of prompts; lower ones mean padding, beginning and end."""


def tiny_config(model_type: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Return the config of a tiny model of a type, with every kind of layer of that type.

    Args:
        model_type: A key of transformers' mapping of configs.
        overrides: Settings besides the table above; a dict for a nested config. The settings in
            `whole` apply before shrinking, if the class lacks valid defaults.
    """
    kind: Any = CONFIG_MAPPING[model_type]
    whole = overrides.get("whole", {})
    known = kind(**whole).to_dict()
    default = kind(**whole, **{k: v for k, v in _SWITCHES.items() if k in known}).to_dict()
    config = kind(**_shrunk(default, overrides))
    assert isinstance(config, PreTrainedConfig)
    return config


def _shrunk(default: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tiny config, given a whole one's values."""
    chosen = _small_layers(default)
    within = {k for k, v in default.items() if isinstance(v, dict) and "model_type" in v}
    for key, value in default.items():
        if key in within:
            chosen[key] = _shrunk(value, overrides.get(key, {}))
        elif key in _FLAGS:
            chosen[key] = _FLAGS[key]
        elif key in _SMALL and key not in chosen and (value or key in _NEVER_NONE):
            chosen[key] = _SMALL[key]
    if default.get("kv_lora_rank"):  # multi-head latent attention
        chosen |= {"num_key_value_heads": HEADS}
        chosen |= {"head_dim": ROPE_DIM} if "head_dim" in default else {}
    chosen |= {key: i for i, key in enumerate(_SPECIAL) if key in default}
    chosen |= {k: v for k, v in overrides.items() if k not in within and k != "whole"}
    if default.get("model_type"):
        chosen["model_type"] = default["model_type"]
    return chosen


def _small_layers(default: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and the per-layer lists: some layers of every kind."""
    counts = {key: value for key, value in default.items() if _SMALL.get(key) == LAYERS and value}
    counts = {key: value for key, value in counts.items() if key.endswith(("layers", "layer"))}
    lists = {
        key: value
        for key, value in default.items()
        if isinstance(value, list) and len(value) in counts.values() and key not in _INDICES
    }
    if not lists:
        return {}
    total = len(next(iter(lists.values())))
    lists = {key: value for key, value in lists.items() if len(value) == total}
    columns = [repr(column) for column in zip(*lists.values(), strict=True)]
    kinds = [columns.index(column) for column in dict.fromkeys(columns)][:MOST_LAYERS]
    others = [i for i in range(total) if i not in kinds]
    picked = sorted(kinds + others[: max(0, LAYERS - len(kinds))])
    small = {key: [value[i] for i in picked] for key, value in lists.items()}
    if "intermediate_size" in small:
        small["intermediate_size"] = [_SMALL["intermediate_size"]] * len(picked)
    return small | {key: len(picked) for key, value in counts.items() if value == total}


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model with random weights that make outputs depend on all inputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() != 3 else parameter.shape[-1]
            torch.nn.init.normal_(parameter, std=GAIN / math.sqrt(fan_in))
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()
