"""Keys and TLS, in both clients and in the commands."""

import grpc
import pytest
from typer.testing import CliRunner

import octavo
from octavo.cli import app

runner = CliRunner()

NAME = "server.example"


@pytest.fixture
def tls(authority):
    return octavo.Tls(authority.ca, *authority.issue("client"), NAME)


@pytest.fixture
def flags(tls):
    return {"ca": tls.ca, "client-cert": tls.cert, "client-key": tls.key, "tls-name": NAME}


async def test_clients_send_the_key_over_tls(secure_service, tls):
    options = {"api_key": "k", "tls": tls}
    with octavo.Client(secure_service.address, **options) as client:
        assert client.generate("a b").text() == "a b "
        client.list_models()
        assert client.is_serving()
    async with octavo.AsyncClient(secure_service.address, **options) as client:
        assert await client.generate("a b").text() == "a b "
        await client.list_models()
        assert await client.is_serving()
    assert secure_service.keys == ["Bearer k"] * 4


async def test_without_a_key_none_is_sent(service):
    with octavo.Client(service.address) as client:
        client.list_models()
    async with octavo.AsyncClient(service.address) as client:
        await client.list_models()
    assert service.keys == [None, None]


async def test_what_is_not_of_the_authority_is_not_talked_to(
    secure_service, service, tls, impostor
):
    others = octavo.Tls(impostor.ca, tls.cert, tls.key, NAME)
    for address, files in (
        (secure_service.address, None),
        (secure_service.address, others),
        (secure_service.address, octavo.Tls(tls.ca, tls.cert, tls.key)),
        (service.address, tls),
    ):
        with octavo.Client(address, tls=files) as client:
            with pytest.raises(octavo.UnavailableError):
                client.list_models(timeout=60)
            assert not client.is_serving()
        async with octavo.AsyncClient(address, tls=files) as client:
            with pytest.raises(octavo.UnavailableError):
                await client.list_models(timeout=60)


def test_files_that_cannot_be_used_are_said(tmp_path):
    missing = octavo.Tls(str(tmp_path / "none.pem"))
    for cls in (octavo.Client, octavo.AsyncClient):
        with pytest.raises(octavo.TlsError, match=r"none\.pem"):
            cls("localhost:1", tls=missing)
        with pytest.raises(ValueError, match="exclude each other"):
            cls("localhost:1", tls=octavo.Tls(), credentials=grpc.ssl_channel_credentials())


COMMANDS = [
    ["generate", "a b"],
    ["chat"],
    ["status", "--once"],
    ["bench", "throughput", "-r", "1", "--warmup", "0", "--prompt-tokens", "4"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("how", ["flags", "variables"])
def test_commands_take_keys_and_files(secure_service, flags, command, how, monkeypatch):
    given = {"address": secure_service.address, "api-key": "secret-key", **flags}
    arguments = [*command]
    for name, value in given.items():
        if how == "flags":
            arguments += [f"--{name}", str(value)]
        else:
            monkeypatch.setenv(f"OCTAVO_{name.replace('-', '_').upper()}", str(value))
    result = runner.invoke(app, arguments, input="a b\n")
    assert result.exit_code == 0, result.output
    assert set(secure_service.keys) == {"Bearer secret-key"}
    assert "secret-key" not in result.output


def test_commands_say_what_is_missing(service, secure_service, tls, tmp_path):
    def stderr(*arguments):
        result = runner.invoke(app, ["status", *map(str, arguments)])
        assert result.exit_code == 1
        return " ".join(result.stderr.split())

    assert "cannot read" in stderr("--ca", tmp_path / "none.pem")
    assert "go together" in stderr("--client-cert", tls.cert)
    assert "--tls" in stderr("--address", secure_service.address)
    assert "does not use TLS" in stderr("--address", service.address, "--ca", tls.ca)
    service.fail(grpc.StatusCode.UNAUTHENTICATED, "who?")
    assert "OCTAVO_API_KEY" in stderr("--address", service.address)


def test_a_report_of_bench_has_no_key(service):
    arguments = ["--address", service.address, "--api-key", "secret-key", "--json", "-"]
    result = runner.invoke(app, [*COMMANDS[-1], *arguments])
    assert result.exit_code == 0
    assert '"address"' in result.stdout
    assert "secret-key" not in result.output


def test_a_proxy_of_the_environment_is_named_where_it_is_asked(service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    with octavo.Client(service.address) as client:
        assert client.generate("a b").text() == "a b "
    found = runner.invoke(app, ["generate", "x", "--address", "octavo.invalid:50051"])
    assert found.exit_code == 1
    assert "http_proxy is set" in found.output
    assert "secret" not in found.output
