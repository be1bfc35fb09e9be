"""The addresses of the HTTP server, by --http-host."""

import socket

import httpx
import pytest

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to IPv6 alone, and to both with IPv6 first."""
    resolve = socket.getaddrinfo

    def with_names(host, *arguments, **options):
        addresses = {"six.test": ["::1"], "both.test": ["::1", "127.0.0.1"]}.get(host, [host])
        return [found for a in addresses for found in resolve(a, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", with_names)


@pytest.mark.parametrize(
    ("host", "hosts"),
    [
        ("::", ["127.0.0.1", "[::1]"]),
        ("[::]", ["127.0.0.1", "[::1]"]),
        ("[::1]", ["[::1]"]),
        ("six.test", ["[::1]"]),
        ("both.test", ["127.0.0.1"]),
    ],
)
async def test_clients_reach_the_address_that_is_named(frontend, scripted, names, host, hosts):
    """`::` accepts IPv4 too, as in gRPC."""
    async with frontend(scripted(), http_host=host) as (app, _), httpx.AsyncClient() as client:
        port = app.url.rpartition(":")[2]
        for name in hosts:
            assert (await client.get(f"http://{name}:{port}/health")).status_code == 200
