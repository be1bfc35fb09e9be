"""200 streams at once: every token once and in order, and cancelled streams leave nothing.

The engine has so few blocks that groups are constantly swapped out.
"""

import asyncio
import random
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import octavo
from benchmarks import fixture
from tests.integration.harness import wait_until

STREAMS = 200
PROMPTS = 20
OUTPUT_TOKENS = 48
TOPICS = ("Paris", "rivers", "bread", "the moon", "glass", "wolves", "iron", "maps", "salt", "rain")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fixture.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(model):
    texts = [
        f"Here is what I know about {topic}: " * (1 + 2 * i)
        for i in range(PROMPTS // len(TOPICS))
        for topic in TOPICS
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text).input_ids for text in texts]


@pytest.fixture(scope="module")
def expected(model, prompts):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lengths = {"max_new_tokens": OUTPUT_TOKENS, "min_new_tokens": OUTPUT_TOKENS}
    outputs = [
        reference.generate(torch.tensor([prompt]), do_sample=False, **lengths) for prompt in prompts
    ]
    return [
        output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)
    ]


@pytest.fixture
async def servers(model):
    engine = fixture.engine(
        model,
        num_blocks=96,
        swap_space=0.01,
        preemption="swap",
        max_model_len=512,
        max_num_seqs=96,
        enable_prefix_caching=False,
    )
    router = fixture.router([engine.address])
    async with fixture.serving([engine], router):
        yield router, engine


def assert_nothing_is_left(router, engine):
    def idle():
        held, queued = engine.metrics(), router.metrics()
        return not (
            held.value("octavo_engine_groups")
            or held.value("octavo_engine_blocks", state="used")
            or held.value("octavo_engine_swap_blocks", state="used")
            or queued.value("octavo_router_requests_in_flight")
            or queued.value("octavo_router_requests_queued")
        )

    wait_until(idle, what="router and engine being empty")


async def collect(client, prompt, tokens):
    """Stream one answer; append its tokens to `tokens`."""
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


def start(client, prompts):
    """Start all streams; return their tasks and token lists."""
    received = [[] for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(collect(client, prompts[i % PROMPTS], received[i]))
        for i in range(STREAMS)
    ]
    return tasks, received


async def test_every_token_once_and_in_order_and_nothing_left_of_cancelled_streams(
    servers, prompts, expected
):
    router, engine = servers
    async with octavo.AsyncClient(router.address) as client:
        began = time.monotonic()
        tasks, received = start(client, prompts)
        finished = await asyncio.gather(*tasks)
        took = time.monotonic() - began
        for i, tokens in enumerate(received):
            assert tokens == expected[i % PROMPTS]
            (end,) = finished[i]
            assert end.usage.output_tokens == OUTPUT_TOKENS
        assert engine.metrics().value("octavo_engine_preemptions_total", mode="swap") > 0
        await asyncio.to_thread(assert_nothing_is_left, router, engine)

        moments = random.Random(0)
        tasks, received = start(client, prompts)
        loop = asyncio.get_running_loop()
        for task in tasks[::2]:
            loop.call_later(moments.uniform(0, took), task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes]
    assert not any(cancelled[1::2])
    lengths = {len(tokens) for tokens, gone in zip(received, cancelled, strict=True) if gone}
    assert 0 in lengths, "none was cancelled before its first token"
    assert max(lengths) > 0, "none was cancelled while decoding"
    for i, tokens in enumerate(received):
        assert tokens == expected[i % PROMPTS][: len(tokens) if cancelled[i] else None]
    await asyncio.to_thread(assert_nothing_is_left, router, engine)
