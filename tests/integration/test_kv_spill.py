"""A server with a KV cache that is smaller than one request, and a file for the rest."""

import random

import grpc
import pytest

import octavo

pytestmark = pytest.mark.slow

LENGTH, BLOCKS = 5000, 128


def ask(server, length=LENGTH, **options):
    """Return the output of a prompt of random tokens."""
    prompt = random.Random(length).choices(range(1000, 40000), k=length)
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "token_ids": True} | options
    with octavo.Client(server.address) as client:
        events = client.generate(prompt, **options).events()
        return [t for event in events if isinstance(event, octavo.Delta) for t in event.token_ids]


@pytest.fixture
def serve(demo_model, launch):
    """Starts a server of so many blocks."""

    def start(*flags, blocks=BLOCKS):
        sizes = ("--num-blocks", str(blocks), "--swap-space", "0", "--dtype", "float32")
        chunks = ("--max-num-batched-tokens", "256")
        return launch("serve", "--model", "demo", *sizes, *chunks, *flags).wait_ready()

    return start


def test_a_prompt_longer_than_the_cache_has_the_same_output(serve, tmp_path):
    enough = serve(blocks=LENGTH // 16 + 32)
    expected, short = ask(enough), ask(enough, 40)
    enough.stop()
    server = serve("--kv-spill", str(tmp_path), "--kv-spill-space", "1")
    assert ask(server, 40) == short
    assert ask(server) == expected
    spilled = server.metric("octavo_engine_spilled_blocks_total", port=server.metrics_port + 1)
    assert spilled > LENGTH // 16 - BLOCKS


def test_without_a_file_it_is_refused(serve):
    with pytest.raises(octavo.Error, match="at most 2047 tokens") as raised:
        ask(serve())
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT
