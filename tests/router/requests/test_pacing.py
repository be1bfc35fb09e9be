import asyncio

import pytest

from octavo.router.requests.pacing import MESSAGE_SECONDS, MOST_SECONDS, Pacer, WriteLimit
from octavo.v1 import engine_pb2, generation_pb2
from octavo.v1.sampling_pb2 import FinishReason

LENGTH = FinishReason.FINISH_REASON_LENGTH


def test_a_few_streams_hardly_wait_and_many_never_long():
    pacer = Pacer()
    assert pacer.interval == 0
    pacer.streams = 10
    assert pacer.interval == pytest.approx(10 * MESSAGE_SECONDS)
    pacer.streams = 1_000_000
    assert pacer.interval == MOST_SECONDS


@pytest.mark.parametrize("others", [0, 100_000])
async def test_of_many_streams_each_gets_tokens_together(scripted, serve, encode, others):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        s.router.generator._pacer.streams = others
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


async def test_a_write_has_so_long_and_many_writes_have_all_the_time():
    async with WriteLimit(0.05) as limit:
        for _ in range(8):
            limit.begin()
            await asyncio.sleep(0)
            limit.end()
            await asyncio.sleep(0.02)

    async def hang():
        async with WriteLimit(0.05) as limit:
            limit.begin()
            await asyncio.sleep(30)

    with pytest.raises(TimeoutError):
        await hang()


async def test_cancellation_stays_cancellation():
    async def write():
        async with WriteLimit(30) as limit:
            limit.begin()
            await asyncio.sleep(30)

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
