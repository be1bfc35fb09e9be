"""Models with real shapes and random weights, as fast as real ones."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.shapes import Layout

CONTEXT = 2048


def save_llama(layout: Layout, folder: Path, device: torch.device) -> None:
    """Save a Llama in bfloat16.

    Args:
        layout: Its sizes.
        folder: Folder for the checkpoint.
        device: Device that makes the random numbers.
    """
    config = LlamaConfig(
        vocab_size=layout.vocab_size,
        hidden_size=layout.hidden_size,
        intermediate_size=layout.intermediate_size,
        num_hidden_layers=layout.num_layers,
        num_attention_heads=layout.num_heads,
        num_key_value_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        max_position_embeddings=CONTEXT,
        dtype=torch.bfloat16,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # going through float32 would take twice the memory
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)


def tiny_layout(layout: Layout) -> Layout:
    """Return a small layout of the same type, to test the benchmark itself."""
    return replace(
        layout,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=256,
        vocab_size=500,
    )
