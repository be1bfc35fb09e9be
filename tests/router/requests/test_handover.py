"""A prefill engine computes the prompt and the first token; another engine goes on."""

import asyncio

import pytest

from octavo.v1 import engine_pb2, generation_pb2
from tests.router.conftest import ScriptedEngine
from tests.router.requests.test_migration import collect, ends, text_of, tokens_of

PREFILL, DECODE = engine_pb2.ENGINE_ROLE_PREFILL, engine_pb2.ENGINE_ROLE_DECODE
TEXT = "and so it goes on and on"
PROMPT = "a prompt that is long enough to be sent to an engine for prompts " * 4


def ask(prompt=PROMPT, **fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=prompt, output={"token_ids": True}, **fields)


@pytest.fixture
def pair(scripted, monkeypatch):
    """A prefill engine and a decode engine, and the latter's prefetches."""
    prefetches = []

    async def prefetch(_self, message, context):
        prefetches.append(message)
        try:
            await asyncio.Event().wait()
        finally:
            prefetches.append("cancelled")

    monkeypatch.setattr(ScriptedEngine, "PrefetchBlocks", prefetch)
    engines = [scripted(TEXT, block_layout="a", interval=0.05, role=r) for r in (PREFILL, DECODE)]
    return *engines, prefetches


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("final_only", [False, True])
async def test_each_token_comes_once(pair, serve, encode, n, final_only):
    one, two, prefetches = pair
    request = ask(sampling={"n": n})
    request.output.final_only = final_only
    async with serve(one, two) as s:
        await s.up(2)
        responses = await collect(s.stub.Generate(request))
        await s.clean()
        assert s.router.generator.metrics.handovers.labels("tiny")._value.get() == 1
        assert s.router.generator.metrics.migrations.labels("tiny")._value.get() == 0
        await s.until(lambda: prefetches[1:] == ["cancelled"])
    (first,), (second,) = one.submits, two.submits
    assert not first.resume
    assert len(second.resume) == n
    assert all(1 <= len(resume.token_ids) <= 3 for resume in second.resume)
    assert (first.kv_source, second.kv_source) == ("", one.address)
    assert prefetches[0].kv_source == one.address
    assert prefetches[0].prompt_token_ids == first.prompt_token_ids
    assert one.aborts == [(first.request_id, None)]
    for index in range(n):
        assert tokens_of(responses, index) == encode(TEXT)
        assert text_of(responses, index) == TEXT
        assert ends(responses)[index].usage.output_tokens == len(encode(TEXT))


async def test_an_output_that_ends_with_its_first_token_stays(pair, serve):
    one, two, _ = pair
    one.script = lambda *_: [5]
    async with serve(one, two) as s:
        await s.up(2)
        responses = await collect(s.stub.Generate(ask()))
        await s.clean()
    assert tokens_of(responses) == [5]
    assert not two.submits


@pytest.mark.parametrize("dead", [0, 1])
async def test_one_role_alone_serves_whole_requests(pair, serve, encode, dead):
    engines = pair[:2]
    async with serve(*engines) as s:
        await s.up(2)
        await engines[dead].kill()
        await s.up(1)
        assert tokens_of(await collect(s.stub.Generate(ask()))) == encode(TEXT)
        await s.clean()
    assert not engines[dead].submits
    assert len(engines[1 - dead].submits) == 1


async def test_a_short_prompt_is_computed_where_it_goes_on(pair, serve, encode):
    one, two, prefetches = pair
    async with serve(one, two) as s:
        await s.up(2)
        assert tokens_of(await collect(s.stub.Generate(ask("short")))) == encode(TEXT)
    assert not one.submits
    assert not prefetches


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_failure_of_either_is_unnoticed(pair, serve, encode, dead):
    engines = pair[:2]
    async with serve(*engines) as s:
        await s.up(2)
        task = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: engines[dead].playing)
        await engines[dead].kill()
        responses = await asyncio.wait_for(task, 20)
        await s.clean()
    assert tokens_of(responses) == encode(TEXT)
    assert len(ends(responses)) == 1


async def test_a_client_that_leaves_ends_its_prefetch(pair, serve):
    one, two, prefetches = pair
    one.interval = None
    async with serve(one, two) as s:
        await s.up(2)
        call = s.stub.Generate(ask())
        await s.until(lambda: one.submits)
        one.send(started=[engine_pb2.Started(request_id=one.submits[0].request_id)])
        await s.until(lambda: prefetches)
        call.cancel()
        await s.until(lambda: prefetches[1:] == ["cancelled"])
        await s.clean()
