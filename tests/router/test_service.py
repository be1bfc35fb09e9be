import asyncio
import itertools
import time

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import generate_latest

from octavo.common import rpc
from octavo.v1 import engine_pb2, generation_pb2
from octavo.v1.sampling_pb2 import FinishReason

LENGTH = FinishReason.FINISH_REASON_LENGTH


def ask(text: str = "prompt", **fields) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=text, **fields)


async def collect(call) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def code_of(call) -> grpc.StatusCode:
    try:
        await collect(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.OK


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


def text_of(responses, index: int = 0) -> str:
    return "".join(r.delta.text for r in responses if r.delta.index == index)


def ends(responses) -> dict[int, generation_pb2.Finished]:
    return {r.finished.index: r.finished for r in responses if r.HasField("finished")}


async def test_streams_accepted_deltas_finished(scripted, serve):
    async with serve(scripted(eos=True)) as s:
        await s.up()
        responses = await collect(s.stub.Generate(ask(request_id="r1")))
        await s.clean()
    kinds = [r.WhichOneof("event") for r in responses]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    accepted = responses[0].accepted
    assert (accepted.request_id, accepted.model, accepted.prompt_tokens) == ("r1", "tiny", 6)
    assert text_of(responses) == "hello world"
    end = ends(responses)[0]
    assert end.reason == FinishReason.FINISH_REASON_EOS
    assert end.stop_token_id == 256
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (6, 12)


async def test_submit_has_all_that_the_engine_needs(scripted, serve, encode):
    engine = scripted()
    async with serve(engine) as s:
        await s.up()
        request = ask(
            "hi", priority=3, cache_salt="s", stop={"strings": ["zz"], "include_in_output": True}
        )
        await collect(s.stub.Generate(request, timeout=20))
        await collect(s.stub.Generate(ask(sampling={"seed": 7})))
    submit, seeded = engine.submits
    assert list(submit.prompt_token_ids) == encode("hi")
    assert submit.priority == 3
    assert submit.cache_salt == "s"
    assert submit.stop.max_tokens == 510
    assert not submit.stop.strings
    assert not submit.stop.include_in_output
    assert submit.sampling.HasField("seed")
    assert 15 < submit.timeout.ToTimedelta().total_seconds() < 21  # gRPC rounds it up
    assert seeded.sampling.seed == 7
    assert not seeded.HasField("timeout")


async def test_outputs_interleave(scripted, serve, encode):
    texts = ["one", "twofold", "three"]
    engine = scripted(script=lambda submit, index: encode(texts[index]))
    async with serve(engine) as s:
        await s.up()
        call = s.stub.Generate(ask(sampling={"n": 3}, output={"token_ids": True}))
        responses = await collect(call)
    assert [text_of(responses, i) for i in range(3)] == texts
    for i, text in enumerate(texts):
        ids = [t for r in responses if r.delta.index == i for t in r.delta.token_ids]
        assert ids == encode(text)
        assert ends(responses)[i].usage.output_tokens == len(text)


async def test_final_only_sends_outputs_whole(scripted, serve, encode):
    texts = ["short", "a good deal longer"]
    engine = scripted(script=lambda submit, index: encode(texts[index]))
    async with serve(engine, max_unread_tokens=8) as s:
        await s.up()
        options = {"token_ids": True, "final_only": True}
        responses = await collect(s.stub.Generate(ask(sampling={"n": 2}, output=options)))
        await s.clean()
    kinds = [(r.WhichOneof("event"), max(r.delta.index, r.finished.index)) for r in responses]
    assert kinds == [
        ("accepted", 0),
        ("delta", 0),
        ("finished", 0),
        ("delta", 1),
        ("finished", 1),
    ]
    assert [text_of(responses, i) for i in range(2)] == texts
    assert list(responses[3].delta.token_ids) == encode(texts[1])


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_one_output(scripted, serve, encode, include):
    texts = ["abc STOP def" * 5, "never stops"]
    engine = scripted(script=lambda submit, index: encode(texts[index]), interval=0.002)
    stop = {"strings": ["STOP"], "include_in_output": include}
    async with serve(engine) as s:
        await s.up()
        responses = await collect(s.stub.Generate(ask(sampling={"n": 2}, stop=stop)))
        await s.clean()
        await s.until(lambda: (engine.submits[0].request_id, None) in engine.aborts)
    assert text_of(responses, 0) == ("abc STOP" if include else "abc ")
    assert text_of(responses, 1) == texts[1]
    end = ends(responses)[0]
    assert end.reason == FinishReason.FINISH_REASON_STOP_STRING
    assert end.stop_string == "STOP"
    assert end.usage.output_tokens == len("abc STOP")
    assert engine.aborts[0] == (engine.submits[0].request_id, 0)


async def test_tokens_by_number_come_before_those_of_an_entry(scripted, serve, encode):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        asked = [ask(sampling={"n": 2}), ask()]
        tasks = [asyncio.create_task(collect(s.stub.Generate(request))) for request in asked]
        await s.until(lambda: len(engine.submits) == 2)
        pair, single = sorted(engine.submits, key=lambda submit: -submit.sampling.n)
        first, other = pair.first_number, single.first_number
        assert len({first, first + 1, other}) == 3
        ends = [(pair, 0, "d"), (pair, 1, "x"), (single, 0, "z")]
        engine.send(
            started=[{"request_id": submit.request_id} for submit in (pair, single)],
            tokens={
                "numbers": [first, other, first, first + 1, first, 999],
                "token_ids": encode("aybwc?"),
            },
            outputs=[
                {
                    "request_id": submit.request_id,
                    "index": index,
                    "token_ids": encode(text),
                    "finish_reason": LENGTH,
                }
                for submit, index, text in ends
            ],
        )
        responses = [await asyncio.wait_for(task, 5) for task in tasks]
        await s.clean()
    assert [text_of(responses[0], i) for i in range(2)] == ["abcd", "wx"]
    assert text_of(responses[1], 0) == "yz"


async def test_prompt_logprobs_come_with_accepted(scripted, serve, encode):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        request = ask(sampling={"n": 2}, output={"prompt_logprobs": 0, "logprobs": 1})
        task = asyncio.create_task(collect(s.stub.Generate(request)))
        await s.until(lambda: engine.submits)
        name = engine.submits[0].request_id
        engine.send(started=[engine_pb2.Started(request_id=name, cached_tokens=4)])
        logprob = {"token_id": 5, "logprob": -1.0}
        engine.send_tokens(name, encode("b"), index=1, reason=LENGTH, logprobs=[logprob])
        engine.send_tokens(
            name, encode("a"), reason=LENGTH, logprobs=[logprob], prompt_logprobs=[logprob] * 5
        )
        responses = await asyncio.wait_for(task, 5)
    assert len(responses[0].accepted.prompt_logprobs) == 5
    assert responses[0].accepted.cached_tokens == 4
    assert {text_of(responses, i) for i in (0, 1)} == {"a", "b"}
    assert sum(len(r.delta.logprobs) for r in responses) == 2
    assert ends(responses)[1].usage.cached_tokens == 4


async def test_an_engine_s_failure_is_the_caller_s_status(scripted, serve):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        task = asyncio.create_task(error_of(s.stub.Generate(ask())))
        await s.until(lambda: engine.submits)
        failure = {"request_id": engine.submits[0].request_id, "code": 3}
        engine.send(failures=[{**failure, "message": "does not fit", "field": "prompt"}])
        error = await asyncio.wait_for(task, 5)
        await s.clean()
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "does not fit")
    (packed,) = rpc_status.from_call(error).details
    detail = error_details_pb2.BadRequest()
    packed.Unpack(detail)
    assert detail.field_violations[0].field == "prompt"


async def test_a_bad_event_fails_its_request_only(scripted, serve, encode):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        calls = [asyncio.create_task(code_of(s.stub.Generate(ask()))) for _ in range(2)]
        await s.until(lambda: len(engine.submits) == 2)
        bad, good = (submit.request_id for submit in engine.submits)
        engine.send(started=[{"request_id": bad}, {"request_id": good}])
        engine.send_tokens(bad, encode("x"), index=7)
        engine.send_tokens(good, encode("x"), reason=LENGTH)
        codes = await asyncio.wait_for(asyncio.gather(*calls), 5)
        await s.clean()
    assert sorted(c.name for c in codes) == ["INTERNAL", "OK"]
    assert (bad, None) in engine.aborts


async def test_an_unexpected_error_is_internal_and_hides_its_details(scripted, serve, monkeypatch):
    async with serve(scripted()) as s:
        await s.up()
        monkeypatch.setattr(s.router.generator._attempts, "run", None)
        error = await error_of(s.stub.Generate(ask()))
        await s.clean()
        labels = {"model": "tiny", "code": "INTERNAL"}
        counted = s.router.registry.get_sample_value("octavo_router_requests_total", labels)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == rpc.UNEXPECTED
    assert counted == 1


async def test_cancel_in_every_phase_leaves_nothing(scripted, serve, encode):
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine) as s:
        await s.up()
        calls = [s.stub.Generate(ask(request_id=f"r{i}")) for i in range(4)]
        tasks = [asyncio.create_task(code_of(call)) for call in calls]
        # One runs, one is the engine's headroom, two wait in the router.
        await s.until(lambda: len(engine.submits) == 2 and len(s.router.admission) == 2)
        first = engine.submits[0].request_id
        engine.send(started=[engine_pb2.Started(request_id=first)])
        engine.send_tokens(first, encode("hel"))
        await asyncio.sleep(0.05)
        for call in calls[::-1]:
            call.cancel()
        codes = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        await s.clean()
        await s.until(lambda: len(engine.aborts) == len(engine.submits))
    assert set(codes) == {grpc.StatusCode.CANCELLED}
    assert {name for name, _ in engine.aborts} == {s.request_id for s in engine.submits}


async def test_deadline_while_queued_and_while_running(scripted, serve):
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine) as s:
        await s.up()
        calls = [code_of(s.stub.Generate(ask(), timeout=0.3)) for _ in range(4)]
        codes = await asyncio.wait_for(asyncio.gather(*calls), 5)
        await s.clean()
        # Waiting requests may have run for an instant in the others' places.
        await s.until(lambda: len(engine.aborts) == len(engine.submits))
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_a_queued_request_is_accepted_with_its_place(scripted, serve):
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine) as s:
        await s.up()
        running = [s.stub.Generate(ask()) for _ in range(2)]
        await s.until(lambda: len(engine.submits) == 2)
        queued = []
        for priority, position in ((0, 1), (0, 2), (1, 1)):
            queued.append(s.stub.Generate(ask(priority=priority)))
            accepted = (await asyncio.wait_for(queued[-1].read(), 5)).accepted
            assert accepted.prompt_tokens == len("prompt")
            assert accepted.queue_position == position
        running[0].cancel()  # one place is free: the first of the queue takes it
        await s.until(lambda: len(engine.submits) == 3)
        request_id = engine.submits[-1].request_id
        engine.send(started=[{"request_id": request_id, "cached_tokens": 3}])
        engine.send_tokens(request_id, [65], reason=FinishReason.FINISH_REASON_LENGTH)
        assert (await queued[2].read()).HasField("delta")
        assert (await queued[2].read()).finished.usage.cached_tokens == 3
        for call in (running[1], *queued[:2]):
            call.cancel()
        await s.clean()


async def test_a_queued_request_for_scores_is_accepted_with_them(scripted, serve):
    """Accepted comes complete, with the prompt's log-probabilities, not before."""
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine) as s:
        await s.up()
        running = [s.stub.Generate(ask()) for _ in range(2)]
        await s.until(lambda: len(engine.submits) == 2)
        call = s.stub.Generate(ask(output={"prompt_logprobs": 0}))
        await s.until(lambda: len(s.router.admission) == 1)
        for one in running:
            one.cancel()
        await s.until(lambda: len(engine.submits) == 3)
        request_id = engine.submits[-1].request_id
        engine.send(started=[{"request_id": request_id}])
        engine.send_tokens(
            request_id,
            [65],
            reason=FinishReason.FINISH_REASON_LENGTH,
            prompt_logprobs=[{"token_id": 1}] * 5,
        )
        (accepted,) = [r.accepted for r in await collect(call) if r.HasField("accepted")]
        assert len(accepted.prompt_logprobs) == 5
        assert not accepted.queue_position


async def test_full_queue_says_when_to_retry(scripted, serve):
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine, max_queue_size=1) as s:
        await s.up()
        calls = [s.stub.Generate(ask()) for _ in range(3)]
        tasks = [asyncio.create_task(code_of(call)) for call in calls]
        await s.until(lambda: len(s.router.admission) == 1)
        error = await error_of(s.stub.Generate(ask()))
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks)
        await s.clean()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (packed,) = rpc_status.from_call(error).details
    retry = error_details_pb2.RetryInfo()
    packed.Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() > 0


async def test_requests_wait_in_an_outage_and_are_then_refused_at_once(scripted, serve):
    engine = scripted()
    async with serve(engine, migration_timeout=0.3) as s:
        await s.up()
        port = int(engine.address.rpartition(":")[2])
        await engine.kill()
        await s.until(lambda: not s.router.pool.up())
        waited = [await error_of(s.stub.Generate(ask())) for _ in range(2)]
        at_once = asyncio.create_task(error_of(s.stub.Generate(ask())))
        await s.until(lambda: at_once.done() or len(s.router.admission))
        assert not len(s.router.admission)
        for error in (*waited, await at_once):
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "tiny" in error.details()
            assert "1 configured" in error.details()
            assert "127.0.0.1" not in error.details()
        await engine.start(port)
        began = time.monotonic()
        await s.up()
        assert time.monotonic() - began < 2
        assert await code_of(s.stub.Generate(ask())) is grpc.StatusCode.OK


async def test_queued_requests_hear_that_the_last_engine_died(scripted, serve):
    engine = scripted(interval=None, max_num_seqs=1)
    async with serve(engine, max_migrations=0, migration_timeout=0.1) as s:
        await s.up()
        calls = [asyncio.create_task(code_of(s.stub.Generate(ask()))) for _ in range(4)]
        await s.until(lambda: len(s.router.admission) == 2)
        await engine.kill()
        codes = await asyncio.wait_for(asyncio.gather(*calls), 5)
        await s.clean()
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}


async def test_draining_engine_gets_nothing_new(scripted, serve):
    drained, other = scripted(), scripted()
    async with serve(drained, other) as s:
        await s.up(2)
        await s.until(lambda: drained.outboxes)
        drained.info.load.draining = True
        await s.until(lambda: len(s.router.pool.candidates("tiny")) == 1)
        for _ in range(4):
            assert await code_of(s.stub.Generate(ask())) is grpc.StatusCode.OK
    assert (len(drained.submits), len(other.submits)) == (0, 4)


async def test_models_by_name(scripted, serve):
    async with serve(scripted("a", model="alpha"), scripted("b", model="beta")) as s:
        await s.up(2)
        for model, text in (("alpha", "a"), ("beta", "b")):
            assert text_of(await collect(s.stub.Generate(ask(model=model)))) == text
        unnamed = await error_of(s.stub.Generate(ask()))
        unknown = await error_of(s.stub.Generate(ask(model="gamma")))
        listed = await s.stub.ListModels(generation_pb2.ListModelsRequest())
    assert unnamed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    for error in (unnamed, unknown):
        assert "alpha, beta" in error.details()
    assert [card.name for card in listed.models] == ["alpha", "beta"]
    assert listed.models[0].total_blocks == 256


def largest(prompt, n, blocks, size):
    """The maximum tokens of n outputs, which share the prompt's full blocks."""
    return max(0, (blocks - prompt // size) // n * size - prompt % size + 1)


async def test_a_valid_request_fits_engines_of_any_block_size(scripted, serve):
    few = scripted(interval=None, block_size=16)  # 5 blocks: 80 tokens
    large = scripted(interval=None, block_size=64)  # 3 blocks: 192 tokens
    few.info.load.total_blocks, large.info.load.total_blocks = 5, 3
    async with serve(few, large) as s:
        await s.up(2)
        limits = s.router.pool.limits("tiny")
        for prompt, n in itertools.product(range(1, 200), range(1, 9)):
            most = min(one.fitting_output(prompt, n, 999) for one in limits.budgets)
            assert most <= largest(prompt, n, 5, 16)
            assert most <= largest(prompt, n, 3, 64)


async def test_one_id_twice_at_once(scripted, serve):
    engine = scripted(interval=0.005)
    async with serve(engine) as s:
        await s.up()
        calls = [collect(s.stub.Generate(ask(request_id="same"))) for _ in range(3)]
        for responses in await asyncio.gather(*calls):
            assert text_of(responses) == "hello world"
            assert responses[0].accepted.request_id == "same"
    names = [submit.request_id for submit in engine.submits]
    assert names[0] == "same"
    assert len(set(names)) == 3


async def test_late_tokens_do_not_reach_a_new_request_of_the_same_id(scripted, serve, encode):
    engine = scripted(interval=None)
    async with serve(engine) as s:
        await s.up()
        old = s.stub.Generate(ask(request_id="same"))
        task = asyncio.create_task(code_of(old))
        await s.until(lambda: engine.submits)
        old.cancel()
        await task
        await s.clean()
        new = asyncio.create_task(collect(s.stub.Generate(ask(request_id="same"))))
        await s.until(lambda: len(engine.submits) == 2)
        engine.send_tokens("same", encode("late"), reason=LENGTH)
        name = engine.submits[1].request_id
        engine.send(started=[engine_pb2.Started(request_id=name)])
        engine.send_tokens(name, encode("new"), reason=LENGTH)
        assert text_of(await asyncio.wait_for(new, 5)) == "new"


async def test_slow_reader_gets_tokens_together(scripted, serve, encode):
    tokens = encode("x") * 400
    engine = scripted(interval=None)
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serve(engine, client_options=window) as s:
        await s.up()
        call = s.stub.Generate(ask(output={"token_ids": True, "logprobs": 20}))
        await s.until(lambda: engine.submits)
        name = engine.submits[0].request_id
        engine.send(started=[engine_pb2.Started(request_id=name)])
        top = [{"token_id": i, "logprob": -1.0} for i in range(20)]
        logprob = {"token_id": 5, "logprob": -1.0, "top": top}
        for i, token in enumerate(tokens):
            reason = LENGTH if i == len(tokens) - 1 else 0
            engine.send_tokens(name, [token], reason=reason, logprobs=[logprob])
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        responses = await collect(call)
        await s.clean()
    deltas = [r.delta for r in responses if r.HasField("delta")]
    assert [t for d in deltas for t in d.token_ids] == tokens
    assert sum(len(d.logprobs) for d in deltas) == 400
    assert len(deltas) < 400


async def test_client_that_never_reads_is_cancelled(scripted, serve, encode):
    engine = scripted(interval=None, max_model_len=100_000)
    engine.info.load.total_blocks = 100_000
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with serve(engine, client_options=window, write_timeout=0.3) as s:
        await s.up()
        call = s.stub.Generate(ask())
        await s.until(lambda: engine.submits)
        name = engine.submits[0].request_id
        engine.send(started=[engine_pb2.Started(request_id=name)])
        tokens = encode("x") * 10_000
        for _ in range(30):
            engine.send_tokens(name, tokens)
            await asyncio.sleep(0.01)
        await s.until(lambda: (name, None) in engine.aborts)
        await s.clean()
        call.cancel()


@pytest.mark.parametrize("numbered", [False, True])
async def test_what_a_client_does_not_read_is_bounded(scripted, serve, encode, numbered):
    engine = scripted(interval=None, max_model_len=1_000_000)
    engine.info.load.total_blocks = 1_000_000
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    limit, chunk = 2000, 500
    async with serve(engine, client_options=window, max_unread_tokens=limit) as s:
        await s.up()
        call = s.stub.Generate(ask(output={"token_ids": True}))
        await s.until(lambda: engine.submits)
        name = engine.submits[0].request_id
        engine.send(started=[engine_pb2.Started(request_id=name)])
        (request,) = s.router.generator._attempts.requests
        (output,) = request.outputs
        most = sent = 0
        while (name, None) not in engine.aborts:
            if numbered:
                numbers = [engine.submits[0].first_number] * chunk
                engine.send(tokens={"numbers": numbers, "token_ids": encode("x") * chunk})
            else:
                engine.send_tokens(name, encode("x") * chunk)
            sent += chunk
            await asyncio.sleep(0.002)
            most = max(most, output.unread)
            assert sent < 500_000, "it was not cancelled"
        assert limit <= most < limit + chunk
        ids, error = [], None
        try:
            async for response in call:
                ids += response.delta.token_ids
        except grpc.aio.AioRpcError as raised:
            error = raised
        await s.clean()
    assert error.code() is grpc.StatusCode.CANCELLED
    assert "did not read" in error.details()
    assert ids == output.token_ids, "what came before is neither lost nor repeated"


async def test_chat_template_errors(scripted, serve, plain_tokenizer_dir):
    plain = scripted(tokenizer=plain_tokenizer_dir, model="plain")
    async with serve(scripted(model="chatty"), plain) as s:
        await s.up(2)

        def chat(model, *roles):
            messages = [{"role": role, "content": "x"} for role in roles]
            return generation_pb2.GenerateRequest(model=model, chat={"messages": messages})

        assert text_of(await collect(s.stub.Generate(chat("chatty", "user")))) == "hello world"
        refused = await error_of(s.stub.Generate(chat("chatty", "tool")))
        missing = await error_of(s.stub.Generate(chat("plain", "user")))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tools are not spoken to" in refused.details()
    assert missing.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_tokenize_and_detokenize(scripted, serve, encode):
    async with serve(scripted()) as s:
        await s.up()
        tokens = await s.stub.Tokenize(generation_pb2.TokenizeRequest(text="née"))
        assert list(tokens.token_ids) == encode("née")
        assert tokens.max_model_len == 512
        bare = generation_pb2.TokenizeRequest(text="née", add_special_tokens=False)
        assert await s.stub.Tokenize(bare) == tokens
        ids = [*tokens.token_ids, 256]
        for keep, text in ((False, "née"), (True, "née</s>")):
            request = generation_pb2.DetokenizeRequest(token_ids=ids, keep_special_tokens=keep)
            assert (await s.stub.Detokenize(request)).text == text
        with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[0\]"):
            await s.stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[999]))


async def test_health_follows_the_engines(scripted, serve):
    engine = scripted()
    async with serve(engine) as s:
        stub = health_pb2_grpc.HealthStub(s.channel)
        request = health_pb2.HealthCheckRequest(service="octavo.v1.GenerationService")

        async def is_serving() -> bool:
            answer = await stub.Check(request)
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        await s.up()
        await asyncio.sleep(0.05)
        assert await is_serving()
        await engine.kill()
        await s.until(lambda: not s.router.pool.up())
        await asyncio.sleep(0.05)
        assert not await is_serving()


async def test_metrics_count_what_happened(scripted, serve):
    async with serve(scripted()) as s:
        await s.up()
        await collect(s.stub.Generate(ask()))
        await error_of(s.stub.Generate(ask("")))
        await s.clean()
        page = generate_latest(s.router.registry).decode()
    assert 'octavo_router_requests_total{code="OK",model="tiny"} 1.0' in page
    assert 'octavo_router_requests_total{code="INVALID_ARGUMENT",model="tiny"} 1.0' in page
    assert 'octavo_router_output_tokens_total{model="tiny"} 11.0' in page
    assert 'octavo_router_prompt_tokens_total{model="tiny"} 6.0' in page
    assert 'octavo_router_ttft_seconds_count{model="tiny"} 1.0' in page
    assert 'octavo_router_tpot_seconds_count{model="tiny"} 1.0' in page
    assert 'octavo_router_itl_seconds_count{model="tiny"} 10.0' in page
    assert 'octavo_router_engines_up{model="tiny"} 1.0' in page
    assert "octavo_router_requests_in_flight 0.0" in page
    assert "octavo_router_requests_queued 0.0" in page


class Wire:
    """A TCP proxy of a port that can be cut silently."""

    def __init__(self, port: int):
        self.port = port
        self.cut = asyncio.Event()
        self.tasks: list[asyncio.Task] = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _connected(self, reader, writer) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self.tasks.append(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source, sink) -> None:
        while data := await source.read(1 << 16):
            if not self.cut.is_set():
                sink.write(data)


async def test_silent_engine_is_noticed_by_keepalive(scripted, serve):
    engine = await scripted(interval=None).start()
    async with Wire(int(engine.address.rpartition(":")[2])) as wire:
        settings = {"keepalive_time": 1.0, "keepalive_timeout": 0.5, "max_migrations": 0}
        async with serve(addresses=[wire.address], **settings) as s:
            await s.up()
            task = asyncio.create_task(error_of(s.stub.Generate(ask())))
            await s.until(lambda: engine.submits)
            wire.cut.set()
            error = await asyncio.wait_for(task, 10)
            await s.clean()
    await engine.kill()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the connection to the request's engine was lost; retry the request"
