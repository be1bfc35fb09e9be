"""A tiny Llama with a byte-level tokenizer, written as a GGUF file."""

from collections.abc import Callable, Collection
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 2
WIDTH = 64  # head size 32, the minimum of the kernels
HEADS = 2
TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
MERGES = ["Ġ 1", "h e", "he l", "l o", "hel lo"]
SPECIAL = ["<|start|>", "<|end|>", "<|pad|>"]
TOKENS = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
START, END, PAD = (TOKENS.index(token) for token in SPECIAL)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""transformers' names of a layer's weights, and llama.cpp's."""


def make_model() -> LlamaForCausalLM:
    """Return the model that `write` writes, with weights from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=len(TOKENS),
        max_position_embeddings=512,
        eos_token_id=END,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    parts: int = 1,
    tokenizer: bool = True,
    leave_out: str = "",
    only: Collection[str] | None = None,
    fields: bool = True,
    add: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the file and return its path.

    Args:
        path: Path of the file.
        kind: Type of the matrices; norms are float32.
        architecture: Architecture in the file.
        parts: Number of parts that the file claims.
        tokenizer: Whether it holds a tokenizer.
        leave_out: A tensor to leave out.
        only: The tensors to write; default: all.
        fields: Whether it has the model's fields, as the first part does.
        add: Writes more fields and tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    if fields:
        _add_fields(writer)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    if tokenizer and fields:
        _add_tokenizer(writer)
    if add is not None:
        add(writer)
    for name, tensor in tensors().items():
        if name != leave_out and (only is None or name in only):
            own = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_fields(writer: gguf.GGUFWriter) -> None:
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))


def tensors() -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names, float32."""
    named = {}
    for name, tensor in make_model().named_parameters():
        weights = tensor.detach().numpy()
        if name.startswith("model.layers."):
            _, _, layer, *rest, end = name.split(".")
            within = ".".join(rest)
            if within.endswith(("q_proj", "k_proj")):
                weights = _interleave(weights)
            named[f"blk.{layer}.{NAMES[within]}.{end}"] = weights
    model = make_model().model
    named["token_embd.weight"] = model.embed_tokens.weight.detach().numpy()
    named["output_norm.weight"] = model.norm.weight.detach().numpy()
    return named


def _interleave(weights: np.ndarray) -> np.ndarray:
    """Reorder rotary pairs half a head apart to adjacent pairs, as in llama.cpp."""
    heads = weights.shape[0] // (WIDTH // HEADS)
    halves = weights.reshape(heads, 2, WIDTH // HEADS // 2, WIDTH)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    control = len(TOKENS) - len(SPECIAL)
    writer.add_token_types([1] * control + [3] * len(SPECIAL))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(START)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(TEMPLATE)
