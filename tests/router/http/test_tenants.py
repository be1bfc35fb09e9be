"""With tenants a key is required; authentication and permission are different errors."""

import asyncio

import grpc.aio
import openai
import pytest

from octavo.router.tenants.tenant import hash_key
from octavo.v1 import generation_pb2


@pytest.fixture
def tenants(tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(
        f"""
        [alice]
        keys = ["{hash_key("alice-key")}"]
        max_concurrency = 1
        [bob]
        keys = ["{hash_key("bob-key")}"]
        models = ["other"]
        [carol]
        keys = ["{hash_key("carol-key")}"]
        admin = true
        """
    )
    return file


async def test_a_key_is_required(frontend, scripted, hello, tenants, get):
    async with frontend(scripted("a"), tenants=tenants, key="alice-key") as (app, client):
        answer = await client.chat.completions.create(**hello)
        assert answer.choices[0].message.content == "a"
        for key, why in (
            ({"Authorization": "Bearer guess"}, "the API key is unknown"),
            ({"Authorization": "Basic guess"}, "`authorization` must be `Bearer KEY`"),
            ({"Authorization": openai.omit}, "an API key is needed, as `authorization: Bearer KEY"),
        ):
            for ask in (
                client.chat.completions.create(**hello, extra_headers=key),
                client.models.retrieve("tiny", extra_headers=key),
            ):
                with pytest.raises(openai.AuthenticationError) as caught:
                    await ask
                assert caught.value.body.pop("message").startswith(why)
                error = {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
                assert caught.value.body == error
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
        for path in ("chat/completions", "completions"):
            rubbish = {"data": b"{", "headers": {"Content-Type": "application/json"}}
            assert (await get(f"{app.url}/v1/{path}", **rubbish)).status == 401
        assert (await get(f"{app.url}/status")).status == 401
        assert (await get(f"{app.url}/v1/models")).status == 401
        assert (await get(f"{app.url}/health")).status == 200


async def test_http_and_grpc_authenticate_alike(frontend, scripted, hello, tenants):
    async with frontend(scripted("a"), tenants=tenants, key="guess") as (app, client):
        with pytest.raises(openai.AuthenticationError) as over_http:
            await client.chat.completions.create(**hello)
        metadata = [("authorization", "Bearer guess")]
        with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
            await app.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata)
        assert over_http.value.body["message"] == over_grpc.value.details()
        refused = app.router.registry.get_sample_value("octavo_router_unauthenticated_total")
        assert refused == 2


async def test_permissions_of_a_key(frontend, scripted, hello, tenants, get):
    async with frontend(scripted("a"), tenants=tenants, key="bob-key") as (app, client):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.chat.completions.create(**hello)
        assert caught.value.param == "model"
        key = {"Authorization": "Bearer bob-key"}
        assert b'"engines":[]' in (await get(f"{app.url}/status", headers=key)).body


async def test_limits_of_a_tenant(frontend, scripted, hello, tenants):
    engine = scripted(interval=None)
    async with frontend(engine, tenants=tenants, key="alice-key") as (app, client):
        running = asyncio.create_task(client.chat.completions.create(**hello))
        await app.until(lambda: engine.submits)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(**hello)
        running.cancel()
        await app.clean()


async def test_a_key_must_be_ascii(frontend, scripted, tenants, get):
    async with frontend(scripted("a"), tenants=tenants) as (app, _):
        odd = {"Authorization": "Bearer \xe9"}
        assert (await get(f"{app.url}/v1/models", headers=odd)).status == 400


async def test_metrics_are_for_admins(frontend, scripted, get, tenants):
    async with frontend(scripted("a"), tenants=tenants) as (app, _):
        for key, status in [(None, 401), ("alice-key", 403), ("carol-key", 200)]:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            response = await get(f"{app.url}/metrics", headers=headers)
            assert response.status == status
            assert (b"octavo_router_info" in response.body) == (status == 200)
        assert (await get(f"{app.url}/version")).status == 401
        assert (await get(f"{app.url}/ping")).status == 200
