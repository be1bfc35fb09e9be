"""A model with several names: all are accepted, and answers have the first."""

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from octavo.router.tenants.tenant import hash_key
from octavo.v1 import engine_pb2, generation_pb2

NAMES = ("tiny", "gpt-4o", "org/tiny")


@pytest.fixture
def named(scripted):
    """Creates an engine whose model has several names."""

    def make(text="a", names=NAMES, **info):
        return scripted(text, model=names[0], aliases=names[1:], **info)

    return make


async def answer(app, model, **call):
    """Return an answer's model and text."""
    request = generation_pb2.GenerateRequest(text="prompt", model=model)
    accepted, *rest = [response async for response in app.stub.Generate(request, **call)]
    return accepted.accepted.model, "".join(response.delta.text for response in rest)


async def refusal(app, model, **call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(app, model, **call)
    return caught.value.code(), caught.value.details()


async def cards(app, **call):
    listed = await app.stub.ListModels(generation_pb2.ListModelsRequest(), **call)
    return {card.name: list(card.aliases) for card in listed.models}


async def test_every_name_is_accepted_over_grpc(named, serve):
    async with serve(named(), named("b", ("other", "more"))) as app:
        await app.up(2)
        for name in NAMES:
            assert await answer(app, name) == ("tiny", "a")
        assert await answer(app, "more") == ("other", "b")
        assert await cards(app) == {"other": ["more"], "tiny": ["gpt-4o", "org/tiny"]}
        tokens = generation_pb2.TokenizeRequest(text="x", model="gpt-4o")
        assert (await app.stub.Tokenize(tokens)).token_ids
        code, said = await refusal(app, "gpt-5")
        assert code is grpc.StatusCode.NOT_FOUND
        assert said.endswith("there is: gpt-4o, more, org/tiny, other, tiny")
        page = app.router.registry.get_sample_value
        labels = {"model": "tiny", "code": "OK"}
        assert page("octavo_router_requests_total", labels) == len(NAMES)


async def test_an_alias_is_no_second_model(named, serve):
    async with serve(named()) as app:
        await app.up()
        assert await answer(app, "") == ("tiny", "a")


@pytest.mark.parametrize("allowed", NAMES)
async def test_a_tenant_may_use_a_model_by_all_its_names(named, serve, tmp_path, allowed):
    file = tmp_path / "tenants.toml"
    file.write_text(f'[a]\nkeys = ["{hash_key("k")}"]\nmodels = ["{allowed}"]')
    call = {"metadata": (("authorization", "Bearer k"),)}
    async with serve(named(), named("b", ("other", "more")), tenants=file) as app:
        await app.up(2)
        for name in ("", *NAMES):
            assert await answer(app, name, **call) == ("tiny", "a")
        assert await cards(app, **call) == {"tiny": ["gpt-4o", "org/tiny"]}
        for name in ("other", "more", "gpt-5"):
            code, said = await refusal(app, name, **call)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert said.endswith(f"it may use: {allowed}")


async def test_an_adapter_is_not_used_by_its_base_s_names(named, serve, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(f'[a]\nkeys = ["{hash_key("k")}"]\nmodels = ["gpt-4o"]')
    call = {"metadata": (("authorization", "Bearer k"),)}
    async with serve(named(adapters=[engine_pb2.Adapter(name="sql")]), tenants=file) as app:
        await app.up()
        assert (await refusal(app, "sql", **call))[0] is grpc.StatusCode.PERMISSION_DENIED
        assert await cards(app, **call) == {"tiny": ["gpt-4o", "org/tiny"]}


async def test_a_model_or_adapter_of_an_alias_s_name_wins(named, scripted, serve):
    real = scripted("b", model="gpt-4o", adapters=[engine_pb2.Adapter(name="org/tiny")])
    with capture_logs() as logs:
        async with serve(named(), real) as app:
            await app.up(2)
            assert await answer(app, "gpt-4o") == ("gpt-4o", "b")
            assert await answer(app, "org/tiny") == ("org/tiny", "b")
            assert await cards(app) == {"gpt-4o": [], "org/tiny": [], "tiny": []}
    warned = {log["alias"]: log for log in logs if log["event"] == "alias means another model"}
    assert sorted(warned) == ["gpt-4o", "org/tiny"]
    assert warned["gpt-4o"]["model"] == "tiny"
    assert warned["gpt-4o"]["used"] == "gpt-4o"
    assert len([log for log in logs if log["event"] == "alias means another model"]) == 2


async def test_of_models_with_one_alias_the_first_has_it_while_it_is_up(named, serve):
    first = named(names=("m-1", "live"))
    async with serve(first, named("b", ("m-2", "live"))) as app:
        await app.up(2)
        assert await answer(app, "live") == ("m-1", "a")
        assert await cards(app) == {"m-1": ["live"], "m-2": []}
        await first.kill()
        await app.up(1)
        assert await answer(app, "live") == ("m-2", "b")
        assert await cards(app) == {"m-2": ["live"]}
