import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from octavo.router.metrics import RouterMetrics
from octavo.router.requests import state as states
from octavo.router.requests.pacing import (
    EARLY,
    MESSAGE_SECONDS,
    MOST_SECONDS,
    limited,
    message_interval,
)
from octavo.router.requests.request import Request
from octavo.router.requests.state import RequestState
from octavo.router.tenants.quota import Account
from octavo.router.tenants.tenant import ANONYMOUS
from octavo.router.text.detokenizer import Pieces
from octavo.v1 import engine_pb2, generation_pb2
from octavo.v1.sampling_pb2 import FinishReason

LENGTH = FinishReason.FINISH_REASON_LENGTH


def test_a_few_streams_hardly_wait_and_many_never_long():
    assert message_interval(0) == 0
    assert message_interval(10) == pytest.approx(10 * MESSAGE_SECONDS)
    assert message_interval(1_000_000) == MOST_SECONDS


@pytest.mark.parametrize("others", [0, 100_000])
async def test_of_many_streams_each_gets_tokens_together(scripted, serve, encode, others):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        s.router.generator._streams = others
        call = s.stub.Generate(generation_pb2.GenerateRequest(text="p"))
        await s.until(lambda: engine.submits)
        name = engine.submits[0].request_id
        texts = []

        async def read():
            async for response in call:
                texts.append(response.delta.text)

        reader = asyncio.create_task(read())
        engine.send(started=[engine_pb2.Started(request_id=name)])
        for number, character in enumerate("abcdefgh"):
            engine.send_tokens(name, encode(character), reason=LENGTH if character == "h" else 0)
            if not others or number == 0:  # the first never waits
                await s.until(lambda n=number: "".join(texts).startswith("abcdefgh"[: n + 1]))
        await asyncio.wait_for(reader, MOST_SECONDS * 50)
        await s.clean()
    texts = [text for text in texts if text]
    assert "".join(texts) == "abcdefgh"
    assert texts[0] == "a"
    assert len(texts) == 8 if not others else len(texts) < 8


def make_state(interval: float) -> RequestState:
    """Return a request whose tokens are its characters' codes."""
    metrics = RouterMetrics(CollectorRegistry(), in_flight=int, queued=int)
    asked = Request(
        request_id="",
        model="m",
        tenant=ANONYMOUS,
        message=generation_pb2.GenerateRequest(),
        prompt=[0],
        max_tokens=100,
        arrival=0.0,
        deadline=None,
    )
    characters = [chr(i) for i in range(128)]
    pieces = Pieces(lambda ids: bytes(ids).decode(), characters, frozenset(), byte_fallback=False)
    with Account(ANONYMOUS, metrics).request() as usage:
        return RequestState(
            asked,
            pieces,
            usage=usage,
            metrics=metrics.of("m"),
            message_interval=lambda: interval,
            max_unread_tokens=100,
        )


async def test_tokens_that_come_too_early_go_with_the_next_and_without_them_soon(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(states, "time", SimpleNamespace(monotonic=lambda: clock.now))
    state = make_state(MOST_SECONDS)

    def come(seconds: float, character: str) -> bool:
        clock.now = seconds
        state.append_tokens(0, [ord(character)])
        return state._changed.is_set()

    def taken() -> str:
        return "".join(response.delta.text for response in state.take())

    assert come(0.0, "a")
    assert taken() == "a"
    assert not come(0.5 * MOST_SECONDS, "b")
    assert come((EARLY + 0.01) * MOST_SECONDS, "c")
    assert taken() == "bc"
    assert not come(1.2 * MOST_SECONDS, "d")
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(state.wait(), 50 * MOST_SECONDS)
    assert asyncio.get_running_loop().time() - began >= 0.9 * MOST_SECONDS
    assert taken() == "d"


async def test_a_write_has_so_long_and_many_writes_have_all_the_time():
    async with limited(asyncio.sleep, 0.05) as write:
        for _ in range(8):
            await write(0)
            await asyncio.sleep(0.02)

    async def hang():
        async with limited(asyncio.sleep, 0.05) as write:
            await write(30)

    with pytest.raises(TimeoutError):
        await hang()


async def test_cancellation_stays_cancellation():
    async def hang():
        async with limited(asyncio.sleep, 30) as write:
            await write(30)

    task = asyncio.create_task(hang())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
