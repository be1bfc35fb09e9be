"""Models with random weights, saved as a checkpoint."""

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
"""Settings of a config, for models that run at once."""


def save_random_model(
    config: PretrainedConfig, path: Path, std: float, **options: object
) -> PreTrainedModel:
    """Save a model with normal weights of deviation `std`, and return it.

    Weights far from uniform decide argmax, so that rounding does not.

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
