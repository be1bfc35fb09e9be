"""Images are fetched from allowed https URLs alone, never from private addresses."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest

from octavo.common.rpc import RpcError
from octavo.router.images import fetch
from octavo.router.images.fetch import Fetcher, is_public
from octavo.router.images.url_pattern import UrlPattern

DATA = b"an image's file " * 9000
HOST = "images.test"


class Site:
    """An https server, and the DNS by which it is found."""

    def __init__(self, authority, monkeypatch):
        pem, key = authority.issue("server", f"dns:{HOST}", "dns:other.test")
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pem, key)
        self._client = authority.client_context()
        self.addresses = [["127.0.0.1"]]
        self.looked_up = []
        self.asked = []
        monkeypatch.setattr(fetch, "look_up", self._look_up)
        monkeypatch.setattr(fetch, "is_public", lambda a: a == "127.0.0.1" or is_public(a))
        monkeypatch.setattr(fetch, "SECONDS", 2.0)
        monkeypatch.setattr(fetch, "MAX_BYTES", 1 << 20)

    async def _look_up(self, host, port):
        self.looked_up.append(host)
        return self.addresses[min(len(self.looked_up), len(self.addresses)) - 1]

    async def _answer(self, reader, writer):
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = request.split()[1]
            self.asked.append(path)
            head, body = "200 OK", DATA
            if path.startswith("/to/"):
                head, body = f"302 Found\r\nLocation: {path.removeprefix('/to/')}", b""
            elif path == "/nowhere":
                head = "302 Found"
            elif path == "/missing":
                head = "404 Not Found"
            elif path == "/slow":
                await asyncio.sleep(30)
            writer.write(f"HTTP/1.1 {head}\r\n".encode())
            for number in range(40 if path == "/endless" else 0):
                writer.write(bytes(1 << 17) if number else b"Content-Type: image/png\r\n\r\n")
                await writer.drain()
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def open(self, pattern="https://images.test:{}/*"):
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"https://{HOST}:{self.port}"
        patterns = [UrlPattern.parse(pattern.format(self.port))]
        try:
            yield Fetcher(patterns, lambda: self._client)
        finally:
            server.close()


@pytest.fixture
def site(authority, monkeypatch):
    return Site(authority, monkeypatch)


async def test_an_allowed_url_is_fetched_and_redirects_followed(site):
    async with site.open() as fetcher:
        assert await fetcher.fetch("x", f"{site.url}/cat.png") == DATA
        assert await fetcher.fetch("x", f"{site.url}/to//to//cat.png") == DATA
    assert site.asked == ["/cat.png", "/to//to//cat.png", "/to//cat.png", "/cat.png"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/missing", "answered 404"),
        ("/nowhere", "answered 302"),
        ("/slow", "did not answer within 2 s"),
        ("/endless", "at most 1048576 bytes"),
        ("/to//to//to//to//cat.png", "more than 3 redirects"),
        ("/to/http://images.test/cat.png", "no URL that --allow-image-urls allows"),
        ("/to/https://127.0.0.1/cat.png", "no URL that --allow-image-urls allows"),
        ("/to/https://other.test/cat.png", "no URL that --allow-image-urls allows"),
        ("/to/file:///etc/passwd", "no URL that --allow-image-urls allows"),
        ("/to/", "cannot be fetched|more than 3 redirects|answered|no URL"),
    ],
)
async def test_an_answer_that_is_no_image_is_refused(site, path, why):
    async with site.open() as fetcher:
        with pytest.raises(RpcError, match=why) as refused:
            await fetcher.fetch("messages[0]", f"{site.url}{path}")
    assert refused.value.field == "messages[0]"


@pytest.mark.parametrize(
    "addresses",
    [["10.1.2.3"], ["192.168.0.1"], ["169.254.169.254"], ["::1"], ["8.8.8.8", "172.16.0.1"]],
)
async def test_a_private_address_is_never_asked(site, addresses):
    site.addresses = [addresses]
    async with site.open() as fetcher:
        with pytest.raises(RpcError, match="not public"):
            await fetcher.fetch("x", f"{site.url}/cat.png")
    assert not site.asked


async def test_a_redirect_to_a_host_that_became_private_is_refused(site):
    site.addresses = [["127.0.0.1"], ["10.0.0.1"]]
    async with site.open() as fetcher:
        with pytest.raises(RpcError, match="not public"):
            await fetcher.fetch("x", f"{site.url}/to//cat.png")
    assert site.asked == ["/to//cat.png"]


async def test_dns_is_asked_once_for_each_request(site):
    site.addresses = [["127.0.0.1"], ["10.0.0.1"]]
    async with site.open() as fetcher:
        assert await fetcher.fetch("x", f"{site.url}/cat.png") == DATA
    assert site.looked_up == [HOST]


async def test_a_server_with_another_certificate_is_refused(site):
    async with site.open("https://wrong.test:{}/*") as fetcher:
        with pytest.raises(RpcError, match="cannot be fetched"):
            await fetcher.fetch("x", f"https://wrong.test:{site.port}/cat.png")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example.com/x.png", True),
        ("https://a.b.example.com/x/y.png", True),
        ("https://A.Example.com/x.png", True),
        ("https://example.com/x.png", False),
        ("https://evil.com/a.example.com/x.png", False),
        ("https://evil.com#.example.com/", False),
        ("https://a.example.com:8443/x.png", False),
        ("https://a.example.com.evil.com/x.png", False),
        ("https://a.example.com/y.png", False),
        ("https://a.example.com/x/../y.png", False),
        ("https://a.example.com/x/%2E%2e/y.png", False),
        ("https://a.example.com/x\\..\\y.png", False),
        ("https://a.example.com/x/..;/y.png", False),
        ("https://a.example.com/x/%2e%2e%3ba=1/y.png", False),
        ("https://a.example.com/x;..png", True),
        ("https://a.example.com/x..png", True),
    ],
)
def test_a_pattern_does_not_reach_beyond_its_part(url, allowed):
    assert UrlPattern.parse("https://*.example.com/x*").matches(fetch.urlsplit(url)) is allowed


@pytest.mark.parametrize(
    "url",
    [
        "http://images.test/x",
        "ftp://images.test/x",
        "https://u:p@images.test/x",
        "//images.test/x",
        "https://[::1/x",
        "https://images.test:x/",
        "",
    ],
)
async def test_what_is_no_plain_https_url_is_refused(site, url):
    fetcher = Fetcher([UrlPattern.parse("https://images.test/*")])
    with pytest.raises(RpcError, match=r"no URL that|cannot be fetched"):
        await fetcher.fetch("x", url)
    assert not site.looked_up


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "::1",
        "fe80::1%eth0",
        "0.0.0.0",
        "::ffff:127.0.0.1",
        "100.64.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "224.0.0.1",
        "fd00::1",
    ],
)
def test_addresses_that_are_not_of_the_internet(address):
    assert not is_public(address)
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1")
