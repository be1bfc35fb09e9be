"""Requests that lose their engine continue at another; hung engines are dropped and readmitted."""

import asyncio

import grpc
import grpc.aio
import pytest

from octavo.common.kv_cache.prefix_hash import reusable_keys, short_key
from octavo.router.engines.breaker import (
    FIRST_SECONDS,
    MAX_SECONDS,
    PROBATION_SECONDS,
    CircuitBreaker,
)
from octavo.v1 import engine_pb2, generation_pb2
from octavo.v1.sampling_pb2 import FinishReason

LENGTH = FinishReason.FINISH_REASON_LENGTH
INTERNAL = grpc.StatusCode.INTERNAL.value[0]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


def ask(**fields) -> generation_pb2.GenerateRequest:
    fields.setdefault("output", {"token_ids": True})
    return generation_pb2.GenerateRequest(text="prompt", **fields)


async def collect(call) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


def tokens_of(responses, index: int = 0) -> list[int]:
    return [t for r in responses if r.delta.index == index for t in r.delta.token_ids]


def text_of(responses, index: int = 0) -> str:
    return "".join(r.delta.text for r in responses if r.delta.index == index)


def ends(responses) -> dict[int, generation_pb2.Finished]:
    return {r.finished.index: r.finished for r in responses if r.HasField("finished")}


async def test_every_token_once_when_an_engine_dies(scripted, serve, encode):
    text = "the quick brown fox, née 日本 🎉 " * 4
    engines = [scripted(text, interval=0.005, max_num_seqs=32) for _ in range(2)]
    async with serve(*engines) as s:
        await s.up(2)
        calls = [asyncio.create_task(collect(s.stub.Generate(ask()))) for _ in range(20)]
        await s.until(lambda: sum(len(engine.playing) for engine in engines) == 20)
        await asyncio.sleep(0.1)
        await engines[0].kill()
        answers = await asyncio.wait_for(asyncio.gather(*calls), 20)
        await s.clean()
    assert len(engines[1].submits) == 20
    assert any(resume.token_ids for submit in engines[1].submits for resume in submit.resume)
    for responses in answers:
        assert [r.WhichOneof("event") for r in responses].count("accepted") == 1
        assert tokens_of(responses) == encode(text)
        assert text_of(responses) == text
        assert ends(responses)[0].usage.output_tokens == len(encode(text))


async def test_a_migrating_request_is_sent_with_its_tokens(scripted, serve, encode):
    first, second = scripted(interval=None), scripted(interval=None)
    request = ask(
        sampling={"n": 3},
        stop={"max_tokens": 9, "min_tokens": 2, "strings": ["stop"]},
        output={"prompt_logprobs": 0},
    )
    async with serve(first, second) as s:
        await s.up(2)
        task = asyncio.create_task(collect(s.stub.Generate(request)))
        await s.until(lambda: first.submits or second.submits)
        doomed, heir = (first, second) if first.submits else (second, first)
        (began,) = doomed.submits
        name = began.request_id
        doomed.send(started=[engine_pb2.Started(request_id=name, cached_tokens=4)])
        doomed.send_tokens(name, encode("abc"), prompt_logprobs=[{"token_id": 1}] * 5)
        doomed.send_tokens(name, encode("stop"), index=1)
        await s.until(lambda: (name, 1) in doomed.aborts)
        await doomed.kill()
        await s.until(lambda: heir.submits)
        (went_on,) = heir.submits
        name = went_on.request_id
        heir.send(started=[engine_pb2.Started(request_id=name, cached_tokens=6)])
        heir.send_tokens(name, encode("de"), reason=LENGTH)
        heir.send_tokens(name, encode("xyz"), index=2, reason=LENGTH)
        responses = await asyncio.wait_for(task, 30)
        await s.clean()
    assert began.output.HasField("prompt_logprobs")
    assert not went_on.output.HasField("prompt_logprobs")
    assert went_on.prompt_token_ids == began.prompt_token_ids
    assert went_on.sampling == began.sampling
    assert went_on.stop == began.stop
    assert [(r.index, list(r.token_ids), r.finished) for r in went_on.resume] == [
        (0, encode("abc"), False),
        (1, [], True),
    ]
    assert [text_of(responses, i) for i in range(3)] == ["abcde", "", "xyz"]
    assert ends(responses)[0].usage.output_tokens == 5
    assert ends(responses)[1].stop_string == "stop"
    assert {end.usage.cached_tokens for end in ends(responses).values()} == {4}


async def test_a_request_refused_by_an_engine_migrates(scripted, serve):
    first, second = scripted(interval=None), scripted()
    async with serve(first, second) as s:
        await s.up(2)
        s.router.pool.up()[1].claims.sequences += 1  # the first has less load
        task = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: first.submits)
        failure = {"request_id": first.submits[0].request_id, "code": UNAVAILABLE}
        first.send(failures=[{**failure, "message": "draining"}], load={"draining": True})
        assert text_of(await asyncio.wait_for(task, 30)) == "hello world"
        s.router.pool.up()[1].claims.sequences -= 1
        await s.clean()
    assert len(second.submits) == 1


async def test_migrating_and_new_requests_wait_for_the_only_engine(scripted, serve, encode):
    engine = scripted("a long answer " * 4, interval=0.01)
    async with serve(engine) as s:
        await s.up()
        task = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: engine.playing)
        port = int(engine.address.rpartition(":")[2])
        await engine.kill()
        await s.until(lambda: len(s.router.admission) == 1)
        new = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: len(s.router.admission) == 2)
        await engine.start(port)
        for request in (task, new):
            assert tokens_of(await asyncio.wait_for(request, 30)) == encode("a long answer " * 4)
        await s.clean()


async def test_a_migrating_request_waits_for_a_limited_time(scripted, serve):
    engine = scripted(interval=None)
    async with serve(engine, migration_timeout=0.2) as s:
        await s.up()
        task = asyncio.create_task(error_of(s.stub.Generate(ask())))
        await s.until(lambda: engine.submits)
        await engine.kill()
        error = await asyncio.wait_for(task, 30)
        await s.clean()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no engine is up" in error.details()


async def test_migrations_are_limited(scripted, serve):
    engine = scripted(interval=None)
    async with serve(engine, max_migrations=2) as s:
        await s.up()
        task = asyncio.create_task(error_of(s.stub.Generate(ask())))
        for attempt in range(3):
            await s.until(lambda n=attempt: len(engine.submits) == n + 1)
            failure = {"request_id": engine.submits[-1].request_id, "code": UNAVAILABLE}
            engine.send(failures=[{**failure, "message": "not now"}])
        error = await asyncio.wait_for(task, 30)
        await s.clean()
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "not now")


async def test_shutdown_fails_a_migrating_request_that_waits(scripted, serve):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        task = asyncio.create_task(error_of(s.stub.Generate(ask())))
        await s.until(lambda: engine.submits)
        await engine.kill()
        await s.until(lambda: len(s.router.admission) == 1)
        s.router.generator.fail_all("the router shut down")
        error = await asyncio.wait_for(task, 30)
        await s.clean()
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the router shut down",
    )


async def test_a_beam_search_starts_again(scripted, serve, encode):
    first, second = (scripted(interval=None) for _ in range(2))
    for engine in (first, second):
        engine.info.features.beam_search = True
    async with serve(first, second) as s:
        await s.up(2)
        task = asyncio.create_task(collect(s.stub.Generate(ask(beam={"width": 2}))))
        await s.until(lambda: first.submits or second.submits)
        doomed, heir = (first, second) if first.submits else (second, first)
        doomed.send(started=[engine_pb2.Started(request_id=doomed.submits[0].request_id)])
        await doomed.kill()
        await s.until(lambda: heir.submits)
        (submit,) = heir.submits
        assert not submit.resume
        heir.send(started=[engine_pb2.Started(request_id=submit.request_id)])
        for i, word in enumerate(("yes", "no")):
            heir.send_tokens(submit.request_id, encode(word), index=i, reason=LENGTH, score=-i)
        responses = await asyncio.wait_for(task, 30)
        await s.clean()
    assert [text_of(responses, i) for i in range(2)] == ["yes", "no"]


async def test_a_hung_engine_is_left_and_readmitted(scripted, serve):
    engines = [scripted("one answer " * 5, interval=0.01) for _ in range(2)]
    async with serve(*engines, heartbeat_timeout=0.6) as s:
        await s.up(2)
        calls = [asyncio.create_task(collect(s.stub.Generate(ask()))) for _ in range(4)]
        await s.until(lambda: all(engine.playing for engine in engines))
        hung, other = engines
        hung.hung = True
        for task in hung.tasks:
            task.cancel()
        answers = await asyncio.wait_for(asyncio.gather(*calls), 30)
        assert {text_of(responses) for responses in answers} == {"one answer " * 5}
        assert [engine.address for engine in s.router.pool.up()] == [other.address]
        await asyncio.sleep(1)  # its server answers, its core does not
        assert [engine.address for engine in s.router.pool.up()] == [other.address]
        hung.hung = False
        await s.up(2)
        await s.clean()


async def test_an_engine_that_fails_again_is_passed_over_while_there_are_others(scripted, serve):
    flaky, sound = scripted(), scripted()
    async with serve(flaky, sound) as s:
        await s.up(2)
        (link,) = [link for link in s.router.pool.links if link.address == flaky.address]
        for _ in range(4):
            link.breaker.trip()
        assert link.breaker.remaining > 1
        for _ in range(4):
            await collect(s.stub.Generate(ask()))
        assert (len(flaky.submits), len(sound.submits)) == (0, 4)
        await sound.kill()
        await s.up(1)
        assert link.breaker.remaining
        await collect(s.stub.Generate(ask()))
        assert len(flaky.submits) == 1


async def test_a_session_that_breaks_gets_no_requests_while_it_is_closed(scripted, serve):
    engine = scripted()
    async with serve(engine) as s:
        await s.up()
        session = s.router.pool.up()[0]
        session._broken = "for a test"
        assert s.router.pool.up() == []
        task = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: len(s.router.admission) == 1)  # it has migrations left
        session._broken = None
        s.router.admission.dispatch("tiny")
        assert text_of(await asyncio.wait_for(task, 30)) == "hello world"
        await s.clean()


def fault(engine, submit):
    failure = {"request_id": submit.request_id, "code": INTERNAL, "message": "a step failed"}
    engine.send(failures=[failure])


async def test_requests_migrate_once_after_a_failed_step_and_to_another_engine(scripted, serve):
    broken, busy = scripted(interval=None), scripted(max_num_seqs=1, interval=None)
    async with serve(broken, busy) as s:
        await s.up(2)
        (link,) = [link for link in s.router.pool.links if link.address == broken.address]
        (other,) = [e for e in s.router.pool.up() if e.address == busy.address]
        other.claims.sequences += 2  # the broken engine is chosen, and the other has no room
        task = asyncio.create_task(collect(s.stub.Generate(ask())))
        await s.until(lambda: broken.submits)
        fault(broken, broken.submits[0])
        await s.until(lambda: len(s.router.admission) == 1)
        assert link.breaker.remaining > 0
        await asyncio.sleep(FIRST_SECONDS + 0.1)
        assert link.breaker.remaining == 0
        assert len(s.router.admission) == 1  # not to the failed engine, however idle
        other.claims.sequences -= 2
        s.router.admission.dispatch("tiny")
        await s.until(lambda: busy.submits)
        fault(busy, busy.submits[0])
        error = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
        await s.clean()
    assert (error[0].code(), error[0].details()) == (grpc.StatusCode.INTERNAL, "a step failed")
    assert (len(broken.submits), len(busy.submits)) == (1, 1)


async def test_a_failed_step_of_the_only_engine_fails_the_request(scripted, serve):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        task = asyncio.create_task(error_of(s.stub.Generate(ask())))
        await s.until(lambda: engine.submits)
        fault(engine, engine.submits[0])
        error = await asyncio.wait_for(task, 30)
        await s.clean()
    assert error.code() is grpc.StatusCode.INTERNAL
    assert len(engine.submits) == 1


async def test_an_engine_whose_step_may_hang_gets_nothing_while_there_are_others(scripted, serve):
    slow, sound = scripted(), scripted()
    async with serve(slow, sound, heartbeat_timeout=5) as s:
        await s.up(2)
        slow.info.load.step_running_seconds = 6
        (engine,) = [e for e in s.router.pool.up() if e.address == slow.address]
        await s.until(lambda: engine.load.step_running_seconds > 5)
        for _ in range(4):
            await collect(s.stub.Generate(ask()))
        assert (len(slow.submits), len(sound.submits)) == (0, 4)
        await sound.kill()
        await s.up(1)
        await collect(s.stub.Generate(ask()))
        assert len(slow.submits) == 1


def test_the_breaker_opens_at_the_first_failed_step_however_long_it_was_up():
    now = 1000.0
    breaker = CircuitBreaker(lambda: now)
    breaker.connected()
    pauses = []
    for _ in range(3):
        now += breaker.remaining + 1
        breaker.fault()
        pauses.append(breaker.remaining)
    assert pauses == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    now += PROBATION_SECONDS
    breaker.fault()
    assert breaker.remaining == FIRST_SECONDS


def test_the_breaker_opens_for_longer_each_time():
    now = 1000.0
    breaker = CircuitBreaker(lambda: now)
    pauses = []
    for _ in range(9):
        breaker.connected()
        now += 1
        breaker.trip()
        pauses.append(breaker.remaining)
        now += breaker.remaining
    assert pauses[:4] == [0, FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS]
    assert pauses[-1] == MAX_SECONDS
    breaker.connected()
    now += PROBATION_SECONDS
    breaker.trip()
    assert breaker.remaining == 0


@pytest.mark.parametrize("layouts", [("a", "a"), ("a", "b"), ("", "")])
async def test_a_migrating_request_names_the_engine_that_has_its_blocks(scripted, serve, layouts):
    engines = [scripted(interval=None, block_layout=layout) for layout in layouts]
    async with serve(*engines) as s:
        await s.up(2)
        task = asyncio.create_task(collect(s.stub.Generate(ask(stop={"max_tokens": 2}))))
        await s.until(lambda: any(engine.submits for engine in engines))
        first, second = sorted(engines, key=lambda engine: not engine.submits)
        assert first.submits[0].kv_source == ""
        request_id = first.submits[0].request_id
        first.send_tokens(request_id, [5])
        await s.until(lambda: s.router.generator._attempts.requests and len(first.outboxes))
        address = first.address
        await first.kill()
        await s.until(lambda: second.submits)
        assert second.submits[0].kv_source == (address if layouts == ("a", "a") else "")
        second.send_tokens(second.submits[0].request_id, [6], reason=LENGTH)
        await task


async def test_a_prefix_that_another_engine_has_is_copied_from_there(scripted, serve, encode):
    text = "x" * 600
    keys = [short_key(key) for key in reusable_keys(encode(text), 16)]
    engines = [
        scripted("ab", block_layout="a", max_model_len=2048, max_num_seqs=1) for _ in range(2)
    ]
    async with serve(*engines, balancing="round_robin") as s:
        await s.up(2)
        engines[0].send(prefixes={"stored": keys})
        up = s.router.pool.up()
        await s.until(lambda: any(engine.prefixes.held(keys) for engine in up))
        for _ in range(2):
            await collect(s.stub.Generate(generation_pb2.GenerateRequest(text=text)))
        sources = [engine.submits[0].kv_source for engine in engines]
        assert sources == ["", engines[0].address]
        engines[0].send(prefixes={"evicted": keys[15:]})  # 240 tokens are left
        await s.until(lambda: all(engine.prefixes.held(keys) < 16 for engine in up))
        for _ in range(2):
            await collect(s.stub.Generate(generation_pb2.GenerateRequest(text=text)))
        assert [engine.submits[1].kv_source for engine in engines] == ["", ""]
