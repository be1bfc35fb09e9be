"""PEM files, as servers and clients use them, over real connections."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from octavo.common import rpc, tls
from octavo.common.listening import listen
from octavo.common.proxies import is_loopback
from octavo.common.tls import Tls, TlsError
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings

HERE = ("ip:127.0.0.1", "dns:localhost")


@asynccontextmanager
async def server(files: Tls | None):
    made, _ = await rpc.create_server({}, max_message_bytes=1 << 20)
    address = listen(made, "127.0.0.1", 0, files)
    await made.start()
    try:
        yield address
    finally:
        await made.stop(None)


async def ask(address, files: Tls | None) -> grpc.StatusCode:
    """Return the outcome of a call on a new connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.aio.insecure_channel(address, options=options)
        if files is None
        else grpc.aio.secure_channel(
            address,
            tls.channel_credentials(files),
            options=[*options, *tls.channel_options(files)],
        )
    )
    async with channel:
        try:
            request = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE


async def test_who_is_of_the_authority_is_let_in(authority, impostor):
    mine = Tls(authority.ca, *authority.issue("server", *HERE))
    client = authority.issue("client")
    async with server(mine) as address:
        assert await ask(address, Tls(authority.ca, *client)) is OK
        assert await ask(address, Tls(authority.ca)) is UNAVAILABLE
        assert await ask(address, Tls(authority.ca, *impostor.issue("client"))) is UNAVAILABLE
        assert await ask(address, Tls(impostor.ca, *client)) is UNAVAILABLE
        assert await ask(address, None) is UNAVAILABLE  # not DEADLINE_EXCEEDED, but at once
        wrong_name = Tls(authority.ca, *client, name="elsewhere.example")
        assert await ask(address, wrong_name) is UNAVAILABLE


async def test_clients_need_no_certificate_where_none_is_asked_for(authority):
    files = authority.issue("server", "dns:engines.example")
    async with server(Tls(None, *files)) as address:
        assert await ask(address, Tls(authority.ca, name="engines.example")) is OK
        assert await ask(address, Tls(authority.ca)) is UNAVAILABLE


async def test_tls_to_a_plaintext_port_fails_at_once(authority):
    async with server(None) as address:
        assert await ask(address, Tls(authority.ca)) is UNAVAILABLE
        assert await ask(address, None) is OK


async def test_changed_files_hold_for_new_connections_and_wrong_ones_do_not(authority, impostor):
    cert, key = authority.issue("server", *HERE)
    fresh_cert, fresh_key = impostor.issue("server", *HERE)
    old, new = Tls(authority.ca), Tls(impostor.ca)
    async with server(Tls(None, cert, key)) as address:
        assert [await ask(address, files) for files in (old, new)] == [OK, UNAVAILABLE]
        before = cert.read_bytes()
        cert.write_bytes(fresh_cert.read_bytes())  # while the old key is still there
        assert [await ask(address, files) for files in (old, new)] == [OK, UNAVAILABLE]
        key.write_bytes(fresh_key.read_bytes())
        assert [await ask(address, files) for files in (old, new)] == [UNAVAILABLE, OK]
        cert.write_bytes(before[:40])
        assert [await ask(address, files) for files in (old, new)] == [UNAVAILABLE, OK]
        cert.unlink()
        assert [await ask(address, files) for files in (old, new)] == [UNAVAILABLE, OK]


async def test_a_changed_client_authority_holds_too(authority, impostor):
    files = authority.issue("server", *HERE)
    theirs, others = authority.issue("client"), impostor.issue("client")
    async with server(Tls(authority.ca, *files)) as address:
        trust = impostor.ca.read_bytes()
        root = Tls(authority.ca).read().ca
        copy = authority.ca.with_name("root.pem")
        copy.write_bytes(root)
        assert await ask(address, Tls(copy, *theirs)) is OK
        assert await ask(address, Tls(copy, *others)) is UNAVAILABLE
        authority.ca.write_bytes(trust)
        assert await ask(address, Tls(copy, *theirs)) is UNAVAILABLE
        assert await ask(address, Tls(copy, *others)) is OK


async def test_a_stream_outlives_the_change(authority):
    cert, key = authority.issue("server", *HERE)
    async with server(Tls(None, cert, key)) as address:
        credentials = tls.channel_credentials(Tls(authority.ca))
        async with grpc.aio.secure_channel(address, credentials) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await call.read()).status
            authority.issue("server", *HERE)
            assert await ask(address, Tls(authority.ca)) is OK
            pending = asyncio.create_task(call.read())
            await asyncio.sleep(0.05)
            assert not pending.done()
            call.cancel()
            await asyncio.gather(pending, return_exceptions=True)


def test_files_that_cannot_be_used_are_named(authority, tmp_path):
    cert, key = authority.issue("server", *HERE)
    _, other_key = authority.issue("other", *HERE)
    nothing, empty = tmp_path / "nothing.pem", tmp_path / "empty.pem"
    empty.write_text("nothing in PEM")
    for files, said in (
        (Tls(cert=nothing, key=key), "cannot read .*nothing.pem: no such file"),
        (Tls(cert=cert, key=nothing), "cannot read .*nothing.pem"),
        (Tls(cert=cert, key=tmp_path), "cannot read .*directory"),
        (Tls(cert=cert, key=other_key), "server.pem and .*other.key .*mismatch"),
        (Tls(cert=empty, key=key), "empty.pem"),
        (Tls(cert=cert, key=empty), "empty.pem"),
        (Tls(ca=empty), "empty.pem has no certificate"),
        (Tls(ca=nothing), "cannot read .*nothing.pem"),
        (Tls(cert=cert), "go together"),
    ):
        with pytest.raises(TlsError, match=f"(?i){said}") as caught:
            files.read()
        assert "\n" not in str(caught.value)


def test_a_key_with_a_passphrase_is_refused(authority):
    from cryptography.hazmat.primitives import serialization

    cert, path = authority.issue("server", *HERE)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pkcs8 = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, locked))
    with pytest.raises(TlsError, match="passphrase"):
        Tls(cert=cert, key=path).read()


def test_contents_are_not_shown(authority):
    contents = Tls(None, *authority.issue("server", *HERE)).read()
    assert "PRIVATE" in contents.key.decode()
    assert "PRIVATE" not in repr(contents)


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (RouterSettings, {"tls_cert": "c"}, "--tls-cert and --tls-key go together"),
        (EngineSettings, {"tls_key": "k", "model": "m"}, "go together"),
        (RouterSettings, {"tls_client_ca": "ca"}, "--tls-client-ca needs --tls-cert"),
        (RouterSettings, {"engine_cert": "c", "engine_ca": "ca"}, "go together"),
        (RouterSettings, {"engine_cert": "c", "engine_key": "k"}, "need --engine-ca"),
        (RouterSettings, {"engine_tls_name": "n"}, "need --engine-ca"),
    ],
)
def test_settings_that_need_each_other(cls, given, said):
    with pytest.raises(ValidationError, match=said):
        cls(**given)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", ""])
def test_not_loopback(host):
    assert not is_loopback(host)
