"""Both clients against a real server with a real model."""

import asyncio

import pytest

import octavo
from tests.integration.harness import Server, wait_until

PARIS = [octavo.Message("user", "What is the capital of France?")]
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def client(served: Server):
    with octavo.Client(served.address) as client:
        yield client


def idle(client: octavo.Client) -> bool:
    (model,) = client.list_models()
    return (model.running, model.waiting, model.free_blocks) == (0, 0, model.total_blocks)


def test_answers(client):
    completion = client.generate(PARIS, temperature=0, max_tokens=20, token_ids=True).complete()
    assert completion.text == "The capital of France is Paris."
    assert completion.outputs[0].reason is octavo.FinishReason.EOS
    assert completion.usage.output_tokens == 8
    assert completion.model == "demo"


def test_prompts_are_shared_only_within_a_salt(client):
    def cached(salt):
        prompt = "Two of a kind, " * 20
        answer = client.generate(prompt, max_tokens=1, cache_salt=salt).complete()
        return answer.usage.cached_tokens

    assert [cached(salt) > 0 for salt in ("a", "a", "b", None, "b", None)] == [
        False,
        True,
        False,
        False,
        True,
        True,
    ]


def test_leaving_the_loop_frees_the_blocks(client):
    for _ in client.generate("Once upon a time", **ENDLESS):
        break
    wait_until(lambda: idle(client), what="no block in use")


def test_timeout(client):
    # Refused at once if the router already knows how long so much work takes.
    with pytest.raises((octavo.DeadlineExceededError, octavo.ResourceExhaustedError)):
        client.generate("Once upon a time", timeout=0.5, **ENDLESS).complete()
    wait_until(lambda: idle(client), what="no block in use")


def test_tokens_there_and_back(client):
    text = "Octavo folds paper. 折り紙 🙂"
    tokens = client.tokenize(text)
    assert client.detokenize(tokens) == text
    assert client.detokenize([1, *tokens, 2]) == text
    assert client.detokenize([1], keep_special_tokens=True) == "<|im_start|>"


async def test_asyncio(served):
    async with octavo.AsyncClient(served.address) as client:
        assert await client.is_serving()
        texts = await asyncio.gather(
            *(client.generate(PARIS, temperature=0, max_tokens=20).text() for _ in range(4))
        )
    assert set(texts) == {"The capital of France is Paris."}


async def test_asyncio_cancelled_task(served, client):
    async with octavo.AsyncClient(served.address) as asynchronous:
        stream = asynchronous.generate("Once upon a time", **ENDLESS)
        task = asyncio.create_task(stream.complete())
        await asyncio.to_thread(wait_until, lambda: stream.accepted is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: idle(client))
