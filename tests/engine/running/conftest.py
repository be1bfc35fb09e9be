"""A model for tests of steps that are recorded."""

import pytest
from transformers import MistralConfig

from tests.engine.random_model import save_random_model

LONGEST = 64
"""Tokens of its longest sequence."""


@pytest.fixture(scope="session")
def window_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("window")
    config = MistralConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        sliding_window=24,
        eos_token_id=2,
    )
    save_random_model(config, path, std=0.15)
    return path
