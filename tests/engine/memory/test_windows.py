"""A model with windows holds only the windows' blocks, however long its sequences are."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.random_model import TINY, save_random_model
from tests.engine.stepper import Stepper

LAYERS, WINDOW, BLOCK_SIZE, STEP_TOKENS = 2, 64, 16, 256
CONTEXT, OUTPUT_TOKENS = 8192, 24
MOST_HELD = (WINDOW + STEP_TOKENS) // BLOCK_SIZE + 2
"""Blocks for a step's tokens and the window before it, with a partial one at either end."""
SHOWN = LAYERS * (WINDOW - 1) + 1
"""Number of tokens that determine the next: each layer sees one more window back."""


@pytest.fixture(scope="module")
def window_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("windows")
    sizes = {"num_hidden_layers": LAYERS, "head_dim": 32, "max_position_embeddings": CONTEXT}
    config = MistralConfig(**TINY | sizes, sliding_window=WINDOW, bos_token_id=None)
    save_random_model(config, path, std=0.15, dtype=torch.float32)
    return path


@torch.inference_mode()
def most_likely(path, tokens, count):
    """Return eager transformers' most likely tokens at the last `count` positions of a sequence.

    It gets only the tokens that determine these, at their positions: all 8,192 would take
    gigabytes.
    """
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    before = range(len(tokens) - SHOWN - count, len(tokens) - 1)
    logits = model(
        torch.tensor([[tokens[at] for at in before]]),
        position_ids=torch.tensor([list(before)]),
        use_cache=False,
    ).logits[0, -count:]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_8192_tokens_hold_blocks_of_a_window(window_model, prefix_caching):
    engine = Stepper(
        build(
            EngineSettings(
                model=str(window_model),
                dtype="float32",
                compile="off",
                block_size=BLOCK_SIZE,
                num_blocks=MOST_HELD + 2,
                swap_space=0,
                max_num_batched_tokens=STEP_TOKENS,
                max_num_seqs=4,
                enable_prefix_caching=prefix_caching,
            )
        )
    )
    assert engine.parts.limits.max_model_len == CONTEXT
    assert CONTEXT // BLOCK_SIZE > 20 * MOST_HELD
    prompt = random.Random(0).choices(range(1, 500), k=CONTEXT - OUTPUT_TOKENS)
    group, held = engine.submit(prompt, OUTPUT_TOKENS), []
    while engine.core.working:
        engine.step()
        held.append(engine.cache.device.num_in_use)
    assert len(held) > CONTEXT // STEP_TOKENS
    assert max(held) <= MOST_HELD
    assert max(held[1 - OUTPUT_TOKENS :]) <= WINDOW // BLOCK_SIZE + 2, "decodes hold a window"
    (sequence,) = group.sequences
    assert sequence.num_tokens == CONTEXT
    assert sequence.token_ids[len(prompt) :] == most_likely(
        window_model, sequence.token_ids, OUTPUT_TOKENS
    )
