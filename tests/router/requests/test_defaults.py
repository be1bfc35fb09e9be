"""Parameters that a request leaves unset get the model's own defaults."""

import pytest
from structlog.testing import capture_logs

from octavo.router.requests.defaults import fill_in
from octavo.v1 import generation_pb2, sampling_pb2

OWN = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


def filled(**fields) -> generation_pb2.GenerateRequest:
    message = generation_pb2.GenerateRequest(text="x", **fields)
    fill_in(message, sampling_pb2.SamplingParams(**OWN))
    return message


def test_what_is_not_set_is_filled_in():
    assert filled().sampling == sampling_pb2.SamplingParams(**OWN)
    own = {"n": 3, "seed": 0, "logit_bias": {5: 1}, "presence_penalty": 0.5}
    assert filled(sampling=own).sampling == sampling_pb2.SamplingParams(**OWN, **own)


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_what_is_set_wins_even_if_neutral(name):
    sampling = filled(sampling={name: NEUTRAL[name]}).sampling
    assert sampling == sampling_pb2.SamplingParams(**{**OWN, name: NEUTRAL[name]})


def test_beam_search_has_none():
    assert not filled(beam={"width": 2}).HasField("sampling")


def engine_with(scripted, **own):
    return scripted("hello world", default_sampling=sampling_pb2.SamplingParams(**own))


async def submitted(app, engine, **fields):
    request = generation_pb2.GenerateRequest(text="prompt", **fields)
    async for _ in app.stub.Generate(request):
        pass
    return engine.submits[-1]


async def test_the_engine_gets_them(scripted, serve):
    engine = engine_with(scripted, **OWN)
    async with serve(engine) as app:
        await app.up()
        got = (await submitted(app, engine, sampling={"top_k": 0, "n": 2, "seed": 7})).sampling
        expected = sampling_pb2.SamplingParams(**{**OWN, "top_k": 0}, n=2, seed=7)
        assert got == expected
        assert got.HasField("top_k")


async def test_a_migrated_request_keeps_them(scripted, serve):
    first, second = engine_with(scripted, temperature=0.5), engine_with(scripted, temperature=2)
    first.interval = None
    await first.start()
    async with serve(first) as app:
        await app.up()
        call = app.stub.Generate(generation_pb2.GenerateRequest(text="prompt"))
        await app.until(lambda: first.submits)
        app.router.pool.add((await second.start()).address)
        await app.up(2)
        await first.kill()
        async for _ in call:
            pass
        assert second.submits[0].sampling == first.submits[0].sampling
        await second.kill()


@pytest.mark.parametrize(
    ("default", "stop", "tokens"),
    [
        (100, {}, 100),
        (100, {"max_tokens": 7}, 7),
        (100, {"max_tokens": 200}, 200),
        (100, {"min_tokens": 150}, 150),
        (10_000, {}, 512 - len("prompt")),
    ],
)
async def test_max_tokens_is_a_default_within_the_room(scripted, serve, default, stop, tokens):
    engine = scripted("hello world", default_max_tokens=default)
    async with serve(engine) as app:
        await app.up()
        assert (await submitted(app, engine, stop=stop)).stop.max_tokens == tokens


async def test_models_tell_them(scripted, serve):
    engine = engine_with(scripted, temperature=0.5)
    engine.info.default_max_tokens = 100
    async with serve(engine, scripted("x", model="plain")) as app:
        await app.up(2)
        plain, own = (await app.stub.ListModels(generation_pb2.ListModelsRequest())).models
        assert (own.default_sampling.temperature, own.default_max_tokens) == (0.5, 100)
        assert not own.default_sampling.HasField("top_k")
        assert plain.default_sampling == sampling_pb2.SamplingParams()
        assert not plain.HasField("default_max_tokens")


async def test_of_engines_that_disagree_the_first_address_s_hold(scripted, serve):
    engines = [await engine_with(scripted, temperature=t).start() for t in (0.25, 0.5)]
    first, second = sorted(engines, key=lambda engine: engine.address)
    expected = first.info.default_sampling
    with capture_logs() as logs:
        async with serve(second, first) as app:
            await app.up(2)
            for _ in range(4):
                async for _ in app.stub.Generate(generation_pb2.GenerateRequest(text="prompt")):
                    pass
            for submit in first.submits + second.submits:
                assert submit.sampling.temperature == expected.temperature
            (card,) = (await app.stub.ListModels(generation_pb2.ListModelsRequest())).models
            assert card.default_sampling == expected
    (warning,) = [line for line in logs if "different defaults" in line["event"]]
    assert (warning["model"], warning["used"]) == ("tiny", first.address)
