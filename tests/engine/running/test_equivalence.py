"""Greedy output is transformers' own, token for token, whatever memory does.

64 prompts of 5 to 500 tokens are all in flight at once, in float32.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

PROMPTS = 64
OUTPUT_TOKENS = 16
SHORTEST, LONGEST = 5, 500
BLOCK_SIZE = 16

pytestmark = pytest.mark.timeout(1200)  # transformers is slow at this on a busy CPU


@pytest.fixture(scope="module")
def prompts(demo_model):
    """Stretches of English, each from another place, most of them short."""
    text = Path(__file__).parents[3].joinpath("LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(demo_model)(text).input_ids
    spread = LONGEST / SHORTEST
    lengths = [round(SHORTEST * spread ** (i / (PROMPTS - 1)) ** 4) for i in range(PROMPTS)]
    starts = [(i * 37) % (len(tokens) - length) for i, length in enumerate(lengths)]
    return [tokens[at : at + length] for at, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """What transformers generates, prompts of like length at a time: it pads them."""
    outputs = []
    for batch in (prompts[:48], prompts[48:56], *([prompt] for prompt in prompts[56:])):
        width = max(map(len, batch))
        padded = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        output = reference.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
        )
        outputs += output[:, width:].tolist()
    return outputs


@pytest.fixture
def outputs(stepper, prompts, reference):
    """Runs all prompts at once under the settings given."""

    def run(**settings):
        engine = stepper(block_size=BLOCK_SIZE, enable_prefix_caching=False, **settings)
        eos = reference.generation_config.eos_token_id
        stopping = [eos] if isinstance(eos, int) else eos
        groups = [
            engine.submit(prompt, OUTPUT_TOKENS, eos=stopping, min_tokens=OUTPUT_TOKENS)
            for prompt in prompts
        ]
        engine.run()
        own = [group.sequences[0].token_ids[len(group.request.prompt) :] for group in groups]
        return engine, own

    return run


def blocks_of(prompts, output_tokens=OUTPUT_TOKENS):
    return sum(-(-(len(prompt) + output_tokens) // BLOCK_SIZE) for prompt in prompts)


@pytest.mark.slow
def test_with_ample_blocks(outputs, expected, prompts):
    engine, got = outputs(num_blocks=blocks_of(prompts) + 64, max_num_batched_tokens=2048)
    assert got == expected
    counters = engine.scheduler.counters
    assert counters.preemptions_swap == counters.preemptions_recompute == 0
    assert max(len(batch.sequences) for batch in engine.batches) == PROMPTS


@pytest.mark.slow  # tests/architectures does both with small models
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_under_preemption(outputs, expected, prompts, mode):
    room_to_grow = 40  # of the 64 blocks that the outputs come to need
    engine, got = outputs(
        num_blocks=blocks_of(prompts, 0) + room_to_grow,
        max_num_batched_tokens=8192,
        preemption=mode,
    )
    assert got == expected
    counters = engine.scheduler.counters
    assert (counters.preemptions_swap > 0) is (mode == "swap")
    assert (counters.preemptions_recompute > 0) is (mode == "recompute")


@pytest.mark.slow  # tests/architectures serves all kinds of models in chunks
def test_with_chunked_prefill(outputs, expected, prompts):
    engine, got = outputs(
        num_blocks=blocks_of(prompts) + 64, max_num_batched_tokens=64, max_num_seqs=64
    )
    assert got == expected
    assert max(batch.num_tokens for batch in engine.batches) == 64
    mixed = [b for b in engine.batches if 1 < len(b.sequences) < b.num_tokens]
    assert mixed, "no step had both decodes and a prefill chunk"
