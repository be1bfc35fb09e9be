"""A model for tests of recorded steps."""

import pytest
from transformers import MistralConfig

from tests.engine.random_model import TINY, save_random_model

LONGEST = 64
"""Tokens of its longest sequence."""


@pytest.fixture(scope="session")
def window_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("window")
    changes = {"max_position_embeddings": LONGEST, "sliding_window": 24, "eos_token_id": 2}
    config = MistralConfig(**TINY | changes)
    save_random_model(config, path, std=0.15)
    return path
