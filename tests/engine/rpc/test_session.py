"""A session's messages from a real core to a router that reads slowly."""

import asyncio
import threading
from functools import partial

import grpc
import pytest

from octavo.common.kv_cache.prefix_hash import reusable_keys, short_key
from octavo.common.rpc import RpcError
from octavo.engine.core import EngineCore
from octavo.engine.events import StepOutput
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.session import Session
from octavo.engine.rpc.validation import to_request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.v1 import engine_pb2
from octavo.v1.sampling_pb2 import FinishReason


@pytest.fixture
async def open_session(tiny_model):
    """Open session 0 of a core that runs a tiny model; its messages go to a queue."""
    parts = build(EngineSettings(model=str(tiny_model), num_blocks=64, swap_space=0))
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()

    def publish(outputs, changes, load):
        loop.call_soon_threadsafe(take, outputs, changes, load)

    def take(outputs, changes, load):
        for change in changes:
            session.add_prefixes(change)
        session.add(outputs.get(0, StepOutput()), load)

    async def read():
        while True:
            yield await messages.get()

    core = EngineCore(
        parts.scheduler,
        parts.executor,
        EngineMetrics(),
        publish,
        max_waiting=50,
    )
    translate = partial(to_request, session=0, limits=parts.limits, eos_token_ids=())
    session = Session(core, translate)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    stream = session.run(0, read())
    yield core, messages, stream
    await stream.aclose()
    core.stop()
    await asyncio.to_thread(thread.join)
    parts.scheduler.cache.check_idle()


async def test_what_is_read_late_has_one_entry_for_each_output(open_session):
    core, messages, stream = open_session
    await anext(stream)
    submit = engine_pb2.Submit(
        request_id="r",
        prompt_token_ids=range(10, 20),
        sampling={"n": 2},
        stop={"max_tokens": 20},
        output={"logprobs": 2, "prompt_logprobs": 1},
    )
    messages.put_nowait(engine_pb2.SessionRequest(submit=submit))
    first = await anext(stream)
    while not first.started:
        first = await anext(stream)
    async with asyncio.timeout(30):
        while not core.idle:
            await asyncio.sleep(0.01)
        # The core publishes the last outputs before it handles another call.
        core.drain()
        while not core.load.draining:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # the session adds the published events
    second = await anext(stream)
    outputs = {0: engine_pb2.SequenceOutput(), 1: engine_pb2.SequenceOutput()}
    for response in (first, second):
        indices = [output.index for output in response.outputs]
        assert sorted(indices) == sorted(set(indices))
        for output in response.outputs:
            outputs[output.index].MergeFrom(output)
    for output in outputs.values():
        assert len(output.token_ids) == 20
        assert [logprob.token_id for logprob in output.logprobs] == output.token_ids
        assert output.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert [logprob.token_id for logprob in outputs[0].prompt_logprobs] == list(range(11, 20))
    assert not outputs[1].prompt_logprobs


@pytest.mark.parametrize("late", [False, True])
async def test_outputs_with_numbers_have_the_same_tokens(open_session, late):
    _, messages, stream = open_session
    common = {
        "prompt_token_ids": range(10, 20),
        "sampling": {"n": 2, "seed": 3},
        "stop": {"max_tokens": 20},
    }
    submits = [
        engine_pb2.Submit(request_id="by entry", **common),
        engine_pb2.Submit(request_id="by number", first_number=5, **common),
        engine_pb2.Submit(request_id="scored", first_number=7, output={"logprobs": 0}, **common),
    ]
    for submit in submits:
        messages.put_nowait(engine_pb2.SessionRequest(submit=submit))
    tokens = {(submit.request_id, i): [] for submit in submits for i in range(2)}
    by_number, ended = 0, 0
    while ended < len(tokens):
        if late:
            await asyncio.sleep(0.1)
        response = await anext(stream)
        for number, token in zip(response.tokens.numbers, response.tokens.token_ids, strict=True):
            tokens["by number", number - 5].append(token)
            by_number += 1
        for output in response.outputs:
            tokens[output.request_id, output.index] += output.token_ids
            ended += output.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert by_number == 2 * 19
    assert [len(found) for found in tokens.values()] == [20] * len(tokens)
    for index in range(2):
        assert len({tuple(tokens[submit.request_id, index]) for submit in submits}) == 1


async def test_a_new_session_hears_what_the_cache_holds(open_session):
    _, messages, stream = open_session
    submit = engine_pb2.Submit(
        request_id="r", prompt_token_ids=range(10, 50), stop={"max_tokens": 1}
    )
    messages.put_nowait(engine_pb2.SessionRequest(submit=submit))
    stored = set()
    async for response in stream:
        stored.update(response.prefixes.stored)
        if any(output.finish_reason for output in response.outputs):
            break
    assert stored == {short_key(key) for key in reusable_keys(range(10, 50), 16)}


async def test_what_is_to_be_said_is_said_before_a_session_closes(open_session):
    core, messages, stream = open_session
    session = stream.ag_frame.f_locals["self"]
    await anext(stream)
    submit = engine_pb2.Submit(request_id="r", prompt_token_ids=[5] * 9, stop={"max_tokens": 400})
    messages.put_nowait(engine_pb2.SessionRequest(submit=submit))
    while not (await anext(stream)).started:
        pass
    core.stop()
    async with asyncio.timeout(30):
        while not session._pending.failures:
            await asyncio.sleep(0.01)
    session.close()
    rest = [response async for response in stream]
    assert [failure.request_id for response in rest for failure in response.failures] == ["r"]


async def test_a_session_whose_events_are_lost_ends_with_a_status(open_session):
    core, messages, stream = open_session
    session = stream.ag_frame.f_locals["self"]
    await anext(stream)
    submit = engine_pb2.Submit(request_id="r", prompt_token_ids=[5] * 9, stop={"max_tokens": 400})
    messages.put_nowait(engine_pb2.SessionRequest(submit=submit))
    while not (await anext(stream)).started:
        pass
    session.fail()
    with pytest.raises(RpcError) as caught:
        await anext(stream)
    assert caught.value.code is grpc.StatusCode.INTERNAL
    async with asyncio.timeout(30):
        while not core.idle:
            await asyncio.sleep(0.01)
