import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, generate_latest

import octavo.router.tenants.auth
from octavo.common.ports import free_port
from octavo.common.settings import SettingsError
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import hash_key
from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def table(name, **limits):
    lines = [f'[{name}]\nkeys = ["{hash_key(f"{name}-key")}"]']
    lines += [f"{key} = {value}" for key, value in limits.items()]
    return "\n".join(lines) + "\n"


def bearer(name):
    return (("authorization", f"Bearer {name}-key"),)


ALICE, BOB = bearer("alice"), bearer("bob")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(octavo.router.tenants.auth, "POLL_SECONDS", 0.02)
    return tmp_path / "tenants.toml"


@pytest.fixture
def shop(serve, scripted, file):
    """A router with tenants and one scripted engine."""

    @asynccontextmanager
    async def make(*tables, engines=None, **settings):
        file.write_text("".join(tables))
        engines = engines or [scripted()]
        async with serve(*engines, tenants=file, **settings) as s:
            await s.up(len(engines))
            yield s

    return make


def ask(text="prompt", **fields):
    return generation_pb2.GenerateRequest(text=text, **fields)


async def read(call):
    return [response async for response in call]


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if hasattr(call, "__await__") else read(call))
    return caught.value


def retry_after(error):
    for detail in rpc_status.from_call(error).details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


WRONG = {
    (): "an API key is needed",
    (("authorization", ""),): "must be `Bearer KEY`",
    (("authorization", "alice-key"),): "must be `Bearer KEY`",
    (("authorization", "Basic alice-key"),): "must be `Bearer KEY`",
    (("authorization", "Bearer nobody-key"),): "the API key is unknown",
    (("authorization", f"Bearer {hash_key('alice-key')}"),): "the API key is unknown",
    (*BOB, *ALICE): "the API key is unknown",
}


async def test_every_call_needs_a_key(shop):
    async with shop(table("alice"), table("bob")) as s:
        for metadata, why in WRONG.items():
            for call in (
                s.stub.Generate(ask(), metadata=metadata),
                s.stub.Tokenize(generation_pb2.TokenizeRequest(text="x"), metadata=metadata),
                s.stub.Detokenize(generation_pb2.DetokenizeRequest(), metadata=metadata),
                s.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata),
            ):
                error = await refused(call)
                assert error.code() is UNAUTHENTICATED
                assert why in error.details()
                assert "alice" not in error.details()
        assert await read(s.stub.Generate(ask(), metadata=ALICE))
        assert await read(s.stub.Generate(ask(), metadata=(("authorization", "bearer bob-key"),)))
        page = generate_latest(s.router.registry).decode()
        assert f"octavo_router_unauthenticated_total {4.0 * len(WRONG)}" in page


async def test_one_key_without_a_file(scripted, serve):
    async with serve(scripted("a"), api_key="alice-key") as s:
        await s.up()
        for metadata, why in WRONG.items():
            error = await refused(s.stub.Generate(ask(), metadata=metadata))
            assert (error.code(), why in error.details()) == (UNAUTHENTICATED, True), why
        await read(s.stub.Generate(ask(priority=7), metadata=ALICE))


def test_the_one_key_is_shown_nowhere():
    settings = RouterSettings.load(api_key="secret")
    assert "secret" not in f"{settings} {settings!r} {settings.model_dump()}"
    for key, other in [
        ("se cret", {}),
        ("secret\n", {}),
        ("sécret", {}),
        ("secret", {"tenants": "t"}),
    ]:
        with pytest.raises(SettingsError, match="--api-key") as caught:
            RouterSettings.load(api_key=key, **other)
        assert "cret" not in str(caught.value)
    with pytest.raises(SettingsError, match="--api-key: must be visible ASCII"):
        RouterSettings.load(api_key="")
    RouterSettings.load(api_key="secret", admin_host="0.0.0.0", admin_port=1)


async def test_who_asks_is_looked_at_before_what_is_asked(shop):
    async with shop(table("alice")) as s:
        method = "/octavo.v1.GenerationService/Generate"
        raw = s.channel.unary_stream(method)
        for message in (b"\xff\xff", ask("").SerializeToString()):
            assert (await refused(raw(message))).code() is UNAUTHENTICATED
            error = await refused(raw(message, metadata=ALICE))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_is_open_and_reflection_is_not(shop):
    async with shop(table("alice")) as s:
        health = health_pb2_grpc.HealthStub(s.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        question = [reflection_pb2.ServerReflectionRequest(list_services="")]
        call = reflection.ServerReflectionInfo(iter(question))
        assert (await refused(call)).code() is UNAUTHENTICATED
        answers = await read(reflection.ServerReflectionInfo(iter(question), metadata=ALICE))
        assert answers[0].HasField("list_services_response")


async def test_models_of_others_are_neither_served_nor_shown(shop, scripted):
    engines = [scripted(model="m1"), scripted(model="m2")]
    tables = table("alice", models=["m1"]), table("bob")
    async with shop(*tables, engines=engines) as s:

        async def models(who):
            answer = await s.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=who)
            return [model.name for model in answer.models]

        assert await models(ALICE) == ["m1"]
        assert await models(BOB) == ["m1", "m2"]
        for name in ("m2", "m3"):
            for call in (
                s.stub.Generate(ask(model=name), metadata=ALICE),
                s.stub.Tokenize(generation_pb2.TokenizeRequest(model=name), metadata=ALICE),
                s.stub.Detokenize(generation_pb2.DetokenizeRequest(model=name), metadata=ALICE),
            ):
                error = await refused(call)
                assert error.code() is DENIED
                assert "it may use: m1" in error.details()
        assert (await read(s.stub.Generate(ask(), metadata=ALICE)))[0].accepted.model == "m1"
        assert (await read(s.stub.Generate(ask(model="m2"), metadata=BOB)))[0].HasField("accepted")


async def test_a_priority_may_be_too_high(shop):
    async with shop(table("alice"), table("bob", max_priority=5)) as s:
        error = await refused(s.stub.Generate(ask(priority=1), metadata=ALICE))
        assert error.code() is DENIED
        await read(s.stub.Generate(ask(priority=0), metadata=ALICE))
        await read(s.stub.Generate(ask(priority=-100), metadata=ALICE))
        await read(s.stub.Generate(ask(priority=5), metadata=BOB))
        assert (await refused(s.stub.Generate(ask(priority=6), metadata=BOB))).code() is DENIED


async def test_limits_refuse_with_the_time_to_come_again(shop, scripted):
    engine = scripted(interval=None)
    tables = table("alice", max_concurrency=1), table("bob", requests_per_second=0.01)
    async with shop(*tables, engines=[engine]) as s:
        running = s.stub.Generate(ask(), metadata=ALICE)
        await s.until(lambda: engine.submits)
        error = await refused(s.stub.Generate(ask(), metadata=ALICE))
        assert error.code() is EXHAUSTED
        assert retry_after(error) > 0
        running.cancel()
        await s.clean()
        again = s.stub.Generate(ask(), metadata=ALICE)
        await s.until(lambda: len(engine.submits) == 2)
        again.cancel()
        await s.stub.Tokenize(generation_pb2.TokenizeRequest(text="x"), metadata=BOB)
        error = await refused(s.stub.Generate(ask(), metadata=BOB))
        assert error.code() is EXHAUSTED
        assert 90 < retry_after(error) <= 100


async def test_tokens_are_charged_and_counted_by_tenant(shop):
    async with shop(table("alice", tokens_per_minute=1), table("bob")) as s:
        await read(s.stub.Generate(ask("six by"), metadata=ALICE))
        error = await refused(s.stub.Generate(ask(), metadata=ALICE))
        assert error.code() is EXHAUSTED
        assert retry_after(error) > 60  # 6 + 11 tokens, at one token per minute
        await read(s.stub.Generate(ask(), metadata=BOB))
        page = generate_latest(s.router.registry).decode()
    tokens = 'octavo_router_tenant_tokens_total{kind="%s",tenant="alice"} %s'
    assert tokens % ("prompt", 6.0) in page
    assert tokens % ("output", 11.0) in page
    requests = 'octavo_router_tenant_requests_total{code="%s",tenant="alice"} 1.0'
    assert requests % "OK" in page
    assert requests % "RESOURCE_EXHAUSTED" in page


async def test_requests_at_once_take_no_more_than_a_minute_s_tokens(shop, scripted):
    engine = scripted("x" * 90, interval=0.001, max_num_seqs=32)
    async with shop(table("alice", tokens_per_minute=300), engines=[engine]) as s:
        request = ask("ten tokens", stop={"max_tokens": 90})
        calls = [read(s.stub.Generate(request, metadata=ALICE)) for _ in range(20)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [each for each in done if isinstance(each, grpc.aio.AioRpcError)]
        assert {error.code() for error in refusals} == {EXHAUSTED}
        assert len(done) - len(refusals) == len(engine.submits) == 3
        assert 0 < retry_after(refusals[0]) <= 20
        await s.clean()


async def test_a_client_that_names_no_max_tokens_is_not_held_to_the_whole_context(shop):
    async with shop(table("alice", tokens_per_minute=600)) as s:
        await read(s.stub.Generate(ask(), metadata=ALICE))
        calls = [read(s.stub.Generate(ask(), metadata=ALICE)) for _ in range(2)]
        done = await asyncio.gather(*calls)  # 256 tokens each, of 506 left in the context
    assert all(responses[-1].HasField("finished") for responses in done)


async def test_engines_and_admission_know_the_tenant(shop, scripted):
    engine = scripted()
    tables = table("alice", weight=3.0), table("bob"), table("carol", share_prefixes='"x"')
    tables = (*tables, table("dave", share_prefixes='"x"'))
    async with shop(*tables, engines=[engine]) as s:
        seen = []
        admit = s.router.admission.admit
        s.router.admission.admit = lambda state, *more: (
            seen.append(state.request) or admit(state, *more)
        )
        for who in ("alice", "bob", "carol", "dave"):
            await read(s.stub.Generate(ask(cache_salt="s"), metadata=bearer(who)))
    assert [(t.tenant.name, t.tenant.weight) for t in seen[:2]] == [("alice", 3.0), ("bob", 1.0)]
    salts = [submit.cache_salt for submit in engine.submits]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3]
    keys = {tuple(request.keys(2)) for request in seen}  # what balancing uses
    assert len(keys) == 3


async def test_the_file_is_read_anew_and_a_broken_one_changes_nothing(shop, file, caplog):
    async with shop(table("alice")) as s:

        async def codes():
            found = []
            for who in (ALICE, BOB):
                try:
                    await read(s.stub.Generate(ask(), metadata=who))
                    found.append(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    found.append(error.code())
            return found

        ok = grpc.StatusCode.OK
        assert await codes() == [ok, UNAUTHENTICATED]
        authenticator = s.router.authenticator
        file.write_text(table("bob"))
        await s.until(lambda: any(t.name == "bob" for t in authenticator._by_key.values()))
        assert await codes() == [UNAUTHENTICATED, ok]
        for broken in ("[bob", "a = " + "[" * 50_000, "a = " + "1" * 5_001, ""):
            before = authenticator._file._read
            file.write_text(broken) if broken else file.unlink()
            await s.until(lambda before=before: authenticator._file._read != before)
            assert await codes() == [UNAUTHENTICATED, ok]
        fresh = file.with_suffix(".new")
        fresh.write_text(table("alice", models=[]))
        fresh.replace(file)
        await s.until(lambda: any(t.name == "alice" for t in authenticator._by_key.values()))
        assert await codes() == [DENIED, UNAUTHENTICATED]


def test_a_file_that_is_being_written_is_left_alone(file):
    file.write_text(table("alice"))
    authenticator = octavo.router.tenants.auth.Authenticator(file, CollectorRegistry())
    file.write_text("")  # as an editor may save it
    authenticator._look(file)
    assert authenticator.authenticate("Bearer alice-key").name == "alice"
    file.write_text(table("alice") + table("bob"))
    authenticator._look(file)
    authenticator._look(file)
    assert authenticator.authenticate("Bearer alice-key").name == "alice"
    assert authenticator.authenticate("Bearer bob-key").name == "bob"


async def test_only_admins_change_engines(shop):
    port = free_port()
    async with (
        shop(table("alice"), table("bob", admin="true"), admin_port=port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        question = admin_pb2.ListEnginesRequest()
        assert (await refused(stub.ListEngines(question))).code() is UNAUTHENTICATED
        assert (await refused(stub.ListEngines(question, metadata=ALICE))).code() is DENIED
        assert (await stub.ListEngines(question, metadata=BOB)).engines
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status


async def test_at_once_many_callers_keep_apart(shop, scripted):
    engine = scripted()
    names = [f"t{i}" for i in range(8)]
    async with shop(*(table(name) for name in names), engines=[engine]) as s:
        calls = [
            s.stub.Generate(ask(name, request_id=f"{name}.{i}"), metadata=bearer(name))
            for i in range(4)
            for name in names
        ]
        await asyncio.gather(*map(read, calls))
    salts = {
        name: {x.cache_salt for x in engine.submits if x.request_id.startswith(f"{name}.")}
        for name in names
    }
    assert all(len(found) == 1 for found in salts.values())
    assert len(set.union(*salts.values())) == len(names)
