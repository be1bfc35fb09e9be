"""200 streams at once: every token once and in order, and nothing left of those that left.

The engine has so few blocks that groups are preempted to swap space all the time.
"""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import octavo
from tests.integration.harness import wait_until

STREAMS = 200
PROMPTS = 20
OUTPUT_TOKENS = 16
TOPICS = ("Paris", "rivers", "bread", "the moon", "glass", "wolves", "iron", "maps", "salt", "rain")


@pytest.fixture(scope="module")
def prompts(demo_model):
    texts = [
        f"Here is what I know about {topic}: " * (1 + 2 * i)
        for i in range(PROMPTS // len(TOPICS))
        for topic in TOPICS
    ]
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    return [tokenizer(text).input_ids for text in texts]


@pytest.fixture(scope="module")
def expected(demo_model, prompts):
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    width = max(map(len, prompts))
    output = model.generate(
        torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=OUTPUT_TOKENS,
        min_new_tokens=OUTPUT_TOKENS,
        do_sample=False,
    )
    return output[:, width:].tolist()


@pytest.fixture(scope="module")
def servers(launch_shared, demo_model):
    engine = launch_shared(
        "engine", "--model", "demo", "--dtype", "float32", "--num-blocks", "160",
        "--swap-space", "0.2", "--preemption", "swap", "--max-model-len", "512",
        "--max-num-seqs", "96", "--no-enable-prefix-caching",
    )  # fmt: skip
    router = launch_shared("router", "--engine", engine.address)
    engine.wait_ready()
    return router.wait_ready(), engine


def assert_nothing_is_left(router, engine):
    def idle():
        return (
            engine.metric("octavo_engine_groups") == 0
            and engine.metric("octavo_engine_blocks", state="used") == 0
            and engine.metric("octavo_engine_swap_blocks", state="used") == 0
            and router.metric("octavo_router_requests_in_flight") == 0
            and router.metric("octavo_router_requests_queued") == 0
        )

    wait_until(idle, what="router and engine being empty")


async def collect(client, prompt, tokens):
    """Streams one answer; `tokens` fills as they come."""
    stream = client.generate(
        prompt,
        temperature=0,
        max_tokens=OUTPUT_TOKENS,
        min_tokens=OUTPUT_TOKENS,
        token_ids=True,
        timeout=240,
    )
    async with stream:
        async for delta in stream:
            tokens += delta.token_ids
    return stream.finished


async def test_every_token_once_and_in_order(servers, prompts, expected):
    router, engine = servers
    received = [[] for _ in range(STREAMS)]
    async with octavo.AsyncClient(router.address) as client:
        finished = await asyncio.gather(
            *(collect(client, prompts[i % PROMPTS], received[i]) for i in range(STREAMS))
        )
    for i, tokens in enumerate(received):
        assert tokens == expected[i % PROMPTS]
        (end,) = finished[i]
        assert end.usage.output_tokens == OUTPUT_TOKENS
    assert engine.metric("octavo_engine_preemptions_total", mode="swap") > 0
    assert_nothing_is_left(router, engine)


async def test_cancelling_half_leaves_nothing(servers, prompts, expected):
    router, engine = servers
    moments = random.Random(0)
    received = [[] for _ in range(STREAMS)]
    async with octavo.AsyncClient(router.address) as client:
        tasks = [
            asyncio.create_task(collect(client, prompts[i % PROMPTS], received[i]))
            for i in range(STREAMS)
        ]
        loop = asyncio.get_running_loop()
        for task in tasks[::2]:
            loop.call_later(moments.uniform(0, 15), task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes]
    assert not any(cancelled[1::2])
    lengths = {len(tokens) for tokens, gone in zip(received, cancelled, strict=True) if gone}
    assert 0 in lengths, "none was cancelled before its first token"
    assert max(lengths) > 0, "none was cancelled while decoding"
    for i, tokens in enumerate(received):
        assert tokens == expected[i % PROMPTS][: len(tokens) if cancelled[i] else None]
    assert_nothing_is_left(router, engine)
