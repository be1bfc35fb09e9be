"""`octavo health` against the health service that router and engine have."""

import asyncio
import json
from contextlib import asynccontextmanager

from typer.testing import CliRunner

from octavo.cli import app
from octavo.common.rpc import create_server, set_serving
from octavo.common.tls import Tls, server_credentials


@asynccontextmanager
async def listening(credentials=None):
    """A server without services; yields its health service and HOST:PORT."""
    server, servicer = await create_server({}, max_message_bytes=1024)
    port = (
        server.add_secure_port("127.0.0.1:0", credentials)
        if credentials
        else server.add_insecure_port("127.0.0.1:0")
    )
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def ask(address: str, *flags: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    arguments = ["health", "--address", address, *flags]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return result.exit_code, result.output.strip()


async def test_ready_and_alive_are_two_things():
    async with listening() as (servicer, address):
        assert await ask(address) == (1, "NOT_SERVING")
        assert await ask(address, "--live") == (0, "SERVING")
        await set_serving(servicer, [""], serving=True)
        assert await ask(address) == (0, "SERVING")
    code, said = await ask(address)
    assert code == 1
    assert f"{address}: UNAVAILABLE" in said


async def test_json():
    async with listening() as (servicer, address):
        code, said = await ask(address, "--json")
        expected = {"address": address, "check": "readiness", "status": "NOT_SERVING"}
        assert (code, json.loads(said)) == (1, expected)
        await set_serving(servicer, [""], serving=True)
        assert (await ask(address, "--json"))[0] == 0
        code, said = await ask(address, "--json", "--live")
        assert (code, json.loads(said)["check"]) == (0, "liveness")
    code, said = await ask(address, "--json")
    result = json.loads(said)
    assert (code, result["status"]) == (1, "UNKNOWN")
    assert result["error"].startswith("UNAVAILABLE: ")


async def test_over_tls_with_a_certificate(authority):
    server = Tls(authority.ca, *authority.issue("server", "ip:127.0.0.1"))
    cert, key = authority.issue("probe")
    flags = ("--ca", str(authority.ca), "--client-cert", str(cert), "--client-key", str(key))
    async with listening(server_credentials(server)) as (_, address):
        assert await ask(address, "--live", *flags) == (0, "SERVING")
        assert (await ask(address, "--live", *flags[:2]))[0] == 1
        code, said = await ask(address, "--ca", "/nowhere.pem")
        assert code == 1
        assert "cannot read /nowhere.pem" in said


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with listening() as (servicer, address):
        await set_serving(servicer, [""], serving=True)
        assert await ask(address) == (0, "SERVING")
