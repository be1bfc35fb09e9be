"""What there is besides generating."""

import json

import pytest

from octavo.common.ports import free_port
from router.config import RouterSettings
from router.server import Router


async def test_models(door, scripted):
    async with door(scripted("a")) as (_, client):
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.object, model.owned_by) == ("tiny", "model", "octavo")
        assert model.max_model_len == 512
        assert await client.models.retrieve("tiny") == model


async def test_status_is_what_engines_report(door, scripted, get, hello):
    engine = scripted("abc", device="abacus", dtype="float32")
    async with door(engine) as (stand, client):
        await client.chat.completions.create(**hello)
        engine.info.load.shared_blocks = 3
        await stand.until(lambda: stand.router.pool.up()[0].load.shared_blocks == 3)
        response = await get(f"{stand.url}/status")
        status = json.loads(response.body)
        assert (status["requests"], status["output_tokens"]) == (0, 3)
        (shown,) = status["engines"]
        assert (shown["model"], shown["device"], shown["dtype"]) == ("tiny", "abacus", "float32")
        assert shown["load"]["total_blocks"] == 256
        assert shown["load"]["shared_blocks"] == 3
        assert engine.address not in response.body.decode()


async def test_health(door, scripted, get):
    engine = scripted("a")
    async with door(engine) as (stand, _):
        assert (await get(f"{stand.url}/health")).status == 200
        await engine.kill()
        await stand.up(0)
        assert (await get(f"{stand.url}/health")).status == 503


async def test_other_origins_only_where_told(door, scripted, get):
    origin = {"Origin": "https://example.com"}
    async with door(scripted("a")) as (stand, _):
        response = await get(f"{stand.url}/v1/models", headers=origin)
        assert "access-control-allow-origin" not in response.headers
    async with door(scripted("a"), http_cors_origin=["https://example.com"]) as (stand, _):
        response = await get(f"{stand.url}/v1/models", headers=origin)
        assert response.headers["access-control-allow-origin"] == "https://example.com"
        response = await get(f"{stand.url}/v1/models", headers={"Origin": "https://evil.com"})
        assert "access-control-allow-origin" not in response.headers


async def test_a_port_that_is_taken(scripted):
    port = free_port()
    settings = {"engine": ["127.0.0.1:1"], "port": 0, "metrics_port": 0, "http_port": port}
    first, second = Router(RouterSettings(**settings)), Router(RouterSettings(**settings))
    await first.start()
    try:
        with pytest.raises(OSError, match="--http-port"):
            await second.start()
    finally:
        await second.stop()
        await first.stop()
