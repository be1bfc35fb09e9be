"""Valid server addresses, in both clients and in the commands."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

import octavo
from octavo.cli import app
from octavo.client.address import parse_address

runner = CliRunner()


@pytest.mark.parametrize(
    ("given", "target", "tls"),
    [
        ("host:1234", "host:1234", False),
        ("host", "host:50051", False),
        (":1234", "localhost:1234", False),
        (" host ", "host:50051", False),
        ("http://host:1234", "host:1234", False),
        ("http://host/", "host:50051", False),
        ("HTTPS://host.example", "host.example:50051", True),
        ("127.0.0.1", "127.0.0.1:50051", False),
        ("::1", "[::1]:50051", False),
        ("[::1]", "[::1]:50051", False),
        ("https://[fe80::1%eth0]:443", "[fe80::1%eth0]:443", True),
        ("unix:/run/octavo.sock", "unix:/run/octavo.sock", False),
        ("dns:///host:1234", "dns:///host:1234", False),
        ("dns:1234", "dns:1234", False),  # a host of this name
    ],
)
def test_addresses(given, target, tls):
    assert parse_address(given) == (target, tls)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "not a host and port"),
        ("host:", "not a host and port"),
        ("host:http", "not a host and port"),
        ("host:0", "ports are 1 to 65535"),
        ("host:65536", "ports are 1 to 65535"),
        ("http://host:8000/v1", "it has a path, /v1"),
        ("user@host:1", "not a host and port"),
        ("a b", "not a host and port"),
        ("tcp://host:1", "tcp:// is not supported"),
    ],
)
def test_what_is_no_address(given, why):
    with pytest.raises(ValueError, match="is not the address of a gRPC server") as caught:
        parse_address(given)
    assert why in str(caught.value)
    assert "HOST:PORT" in str(caught.value)


async def test_both_clients_take_urls(service):
    port = service.address.rpartition(":")[2]
    for address in (f"http://127.0.0.1:{port}", f":{port}"):
        with octavo.Client(address) as client:
            assert client.is_serving()
        async with octavo.AsyncClient(address) as client:
            assert await client.is_serving()


async def test_https_is_tls(secure_service, authority):
    tls = octavo.Tls(authority.ca, *authority.issue("client"), "server.example")
    with octavo.Client(f"https://{secure_service.address}", tls=tls) as client:
        assert client.is_serving()
    with octavo.Client(f"https://{secure_service.address}") as client:  # of another authority
        assert not client.is_serving()
    with pytest.raises(ValueError, match="without TLS, but TLS is set"):
        octavo.Client(f"http://{secure_service.address}", tls=tls)


def test_commands_take_urls(service):
    result = runner.invoke(app, ["status", "--json", "--address", f"http://{service.address}/"])
    assert json.loads(result.stdout)["address"] == service.address


def test_commands_name_what_is_wrong(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(app, ["status", "--address", "http://localhost:8000/v1"])
    assert result.exit_code == 2
    assert "it has a path, /v1" in result.stderr


def test_a_port_of_http_is_told():
    """An example is the HTTP API's port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        result = runner.invoke(app, ["status", "--once", "--address", address])
        server.shutdown()
    assert result.exit_code == 1
    assert "speaks no gRPC; set --address to the server's --port (default 50051)" in result.stderr
