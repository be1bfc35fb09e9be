"""Creates models with random weights, saved as checkpoints."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

TINY = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
"""Config settings for models that start at once."""


def save_random_model(
    config: PretrainedConfig, path: Path, std: float, **options: object
) -> PreTrainedModel:
    """Save a model with normally distributed weights; return it.

    Large weights make the argmax clear, so that rounding does not decide it.

    Args:
        config: The model's configuration.
        path: The checkpoint's directory.
        std: The standard deviation of all weights.
        **options: Options of `from_config`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(path)
    return model
