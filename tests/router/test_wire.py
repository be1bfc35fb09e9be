"""TLS between clients, router and engines, and certificates as identities."""

import grpc
import grpc.aio
import pytest
import structlog.testing
from pydantic import ValidationError

import octavo.router.engines.link
import octavo.router.server
import octavo.router.tenants.auth
from octavo.common.ports import free_port
from octavo.common.tls import Tls, TlsError
from octavo.router.server import Router
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import hash_key
from octavo.v1 import admin_pb2, admin_pb2_grpc, generation_pb2

HERE = ("ip:127.0.0.1", "dns:localhost")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def port_files(authority):
    """Return the router's settings for a port that requires certificates."""
    cert, key = authority.issue("router", *HERE)
    return {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}


async def outcome(fixture, metadata=(), channel=None):
    """Return a request's status, or the text of its answer."""
    method = "/octavo.v1.GenerationService/Generate"
    call = (channel or fixture.channel).unary_stream(
        method,
        request_serializer=generation_pb2.GenerateRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerateResponse.FromString,
    )(generation_pb2.GenerateRequest(text="hi"), metadata=metadata)
    try:
        return "".join([response.delta.text async for response in call])
    except grpc.aio.AioRpcError as error:
        return error.code()


async def test_both_hops_with_certificates_on_all_sides(scripted, serve, authority, port_files):
    engine = await scripted().start(tls=Tls(authority.ca, *authority.issue("engine", *HERE)))
    cert, key = authority.issue("router-to-engine")
    to_engine = {"engine_ca": authority.ca, "engine_cert": cert, "engine_key": key}
    mine = Tls(authority.ca, *authority.issue("client"))
    async with serve(engine, client_tls=mine, **port_files, **to_engine) as s:
        await s.up()
        assert await outcome(s) == "hello world"


async def test_an_engine_takes_only_its_routers_and_a_router_only_its_engines(
    scripted, serve, authority, impostor, monkeypatch
):
    log = structlog.testing.CapturingLogger()
    monkeypatch.setattr(octavo.router.engines.link, "log", log)
    picky = await scripted().start(tls=Tls(authority.ca, *authority.issue("engine", *HERE)))
    false = await scripted().start(tls=Tls(None, *impostor.issue("engine", *HERE)))
    elsewhere = await scripted().start(tls=Tls(None, *authority.issue("x", "dns:x.example")))
    plain = await scripted().start()
    good = await scripted().start(tls=Tls(None, *authority.issue("good", *HERE)))
    async with serve(good, picky, false, elsewhere, plain, engine_ca=authority.ca) as s:
        await s.up()
        refused = {engine.address for engine in (picky, false, elsewhere, plain)}
        await s.until(lambda: {call.kwargs.get("engine") for call in log.calls} >= refused)
        assert [engine.address for engine in s.router.pool.up()] == [good.address]
        events = {call.args for call in log.calls if call.kwargs["engine"] in refused}
        assert events == {("engine unreachable",)}


async def test_the_name_in_engines_certificates_may_be_another(scripted, serve, authority):
    files = Tls(None, *authority.issue("engine", "dns:engines.example"))
    engine = await scripted().start(tls=files)
    named = {"engine_ca": authority.ca, "engine_tls_name": "engines.example"}
    async with serve(engine, **named) as s:
        await s.up()
        assert await outcome(s) == "hello world"


async def test_new_connections_to_engines_use_new_files(scripted, serve, authority, impostor):
    cert, key = authority.issue("router-to-engine")
    own = {"engine_ca": authority.ca, "engine_cert": cert, "engine_key": key}
    engine = await scripted().start(tls=Tls(authority.ca, *authority.issue("engine", *HERE)))
    port = int(engine.address.rpartition(":")[2])
    async with serve(engine, **own) as s:
        await s.up()
        await engine.kill()
        await s.until(lambda: not s.router.pool.up())
        await engine.start(port, Tls(impostor.ca, *impostor.issue("engine", *HERE)))
        for file, fresh in zip((cert, key), impostor.issue("fresh"), strict=True):
            file.write_bytes(fresh.read_bytes())
        authority.ca.write_bytes(impostor.ca.read_bytes())
        await s.up()
        assert await outcome(s) == "hello world"


async def test_a_certificate_identifies_a_tenant(
    scripted, serve, authority, port_files, tmp_path, open_channel, monkeypatch
):
    monkeypatch.setattr(octavo.router.tenants.auth, "POLL_SECONDS", 60)
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f"""
[alice]
certificates = ["uri:spiffe://octavo/alice"]
[bob]
certificates = ["dns:bob.example"]
[carol]
certificates = ["cn:carol"]
[dave]
keys = ["{hash_key("dave-key")}"]
""")
    engine = scripted()
    callers = {
        "alice": Tls(authority.ca, *authority.issue("a", "uri:spiffe://octavo/alice")),
        "bob": Tls(authority.ca, *authority.issue("b", "dns:bob.example", cn="any")),
        "carol": Tls(authority.ca, *authority.issue("c", cn="carol")),
        "nobody": Tls(authority.ca, *authority.issue("n", "dns:carol", cn="dave")),
        "both": Tls(authority.ca, *authority.issue("t", "dns:bob.example", cn="carol")),
    }
    found = {}
    async with serve(engine, client_tls=callers["alice"], tenants=tenants, **port_files) as s:
        await s.up()
        for name, files in callers.items():
            async with open_channel(s.router.address, files) as channel:
                found[name] = await outcome(s, channel=channel)
                key = (("authorization", "Bearer dave-key"),)
                assert await outcome(s, key, channel) == "hello world"
                wrong = (("authorization", "Bearer alice-key"),)
                assert await outcome(s, wrong, channel) is UNAUTHENTICATED
    assert found == {
        **dict.fromkeys(("alice", "bob", "carol"), "hello world"),
        **dict.fromkeys(("nobody", "both"), UNAUTHENTICATED),
    }
    salts = [submit.cache_salt for submit in engine.submits]
    assert len(set(salts)) == 4  # the three and dave


async def test_admin_service_speaks_the_router_s_tls(
    scripted, serve, authority, port_files, open_channel
):
    port = free_port()
    mine = Tls(authority.ca, *authority.issue("client"))
    async with serve(scripted(), client_tls=mine, admin_port=port, **port_files) as s:
        await s.up()
        codes = []
        for files in (mine, Tls(authority.ca), None):
            async with open_channel(f"127.0.0.1:{port}", files) as channel:
                try:
                    stub = admin_pb2_grpc.AdminServiceStub(channel)
                    await stub.ListEngines(admin_pb2.ListEnginesRequest())
                    codes.append(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert codes == [grpc.StatusCode.OK, unavailable, unavailable]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_admin_service_needs_authentication(host, tmp_path):
    with pytest.raises(ValidationError, match="--tenants with an admin"):
        RouterSettings(admin_host=host, admin_port=1)
    RouterSettings(admin_host=host, admin_port=0)
    RouterSettings(admin_host=host, admin_port=1, tenants=tmp_path)
    RouterSettings(admin_host=host, admin_port=1, tls_cert="c", tls_key="k", tls_client_ca=tmp_path)


@pytest.mark.parametrize(
    "which", [{"tls_cert": "none.pem", "tls_key": "none.key"}, {"engine_ca": "none.pem"}]
)
async def test_a_router_without_its_files_does_not_start(which):
    made = Router(RouterSettings(port=0, metrics_port=0, **which))
    try:
        with pytest.raises(TlsError, match=r"cannot read none\.pem: No such file"):
            await made.start()
    finally:
        await made.stop()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "0.0.0.0"}, "the router is unauthenticated"),
        ({"host": "0.0.0.0", "tenants": True}, "API keys are sent unencrypted"),
        ({"host": "0.0.0.0", "tls": True}, None),
        ({"host": "127.0.0.1"}, None),
    ],
)
async def test_an_unauthenticated_port_is_warned_of(
    serve, given, said, port_files, tmp_path, monkeypatch
):
    log = structlog.testing.CapturingLogger()
    monkeypatch.setattr(octavo.router.server, "log", log)
    given = dict(given)
    if given.pop("tenants", False):
        given["tenants"] = tmp_path / "tenants.toml"
        given["tenants"].write_text("")
    if given.pop("tls", False):
        given |= port_files
    async with serve(**given, addresses=["127.0.0.1:1"]):
        pass
    warned = [call.args[0] for call in log.calls if call.method_name == "warning"]
    assert warned == ([said] if said else [])
