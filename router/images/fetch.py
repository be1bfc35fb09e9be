"""Fetches images from https URLs that the operator allows, never from private addresses."""

import asyncio
import ipaddress
import mmap
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import cache
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx2

from octavo.common import rpc
from octavo.router.images.decode import MAX_BYTES
from octavo.router.images.url_pattern import HTTPS_PORT, UrlPattern

SECONDS = 10.0
"""Maximum time of a fetch, redirects included."""
MAX_REDIRECTS = 3
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity"}
"""Headers of each request."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that lead to the IPv4 address in their last 32 bits (RFC 6052)."""


class Fetcher:
    """Fetches images.

    Every address that a host has must be public. The connection is made to one that was checked,
    so the answer of a second look-up does not matter; redirects are checked like the first URL.

    Args:
        patterns: The allowed URLs.
        context: Makes what authenticates servers. Default: by the system's certificates.
    """

    def __init__(
        self,
        patterns: Sequence[UrlPattern],
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._patterns = patterns
        self._context = cache(context)  # reading the certificates takes 20 ms

    async def fetch(self, field: str, url: str) -> bytes:
        """Return the file at a URL.

        Args:
            field: The URL's place in the request.
            url: The URL.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if it is not allowed or has no file.
        """
        try:
            async with asyncio.timeout(SECONDS):
                return await self._follow(field, url)
        except TimeoutError:
            raise rpc.invalid(field, f"{field} did not answer within {SECONDS:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise rpc.invalid(field, f"{field} cannot be fetched: {why}") from None

    async def _follow(self, field: str, url: str) -> bytes:
        async with httpx2.AsyncClient(
            verify=self._context(), timeout=None, trust_env=False
        ) as client:
            for _ in range(1 + MAX_REDIRECTS):
                parts = urlsplit(url)
                self._check(field, parts)
                host = parts.hostname or ""
                address = await self._address(field, host, parts.port or HTTPS_PORT)
                request = client.build_request(
                    "GET",
                    httpx2.URL(url).copy_with(host=address),
                    headers={"Host": parts.netloc, **HEADERS},
                    extensions={"sni_hostname": host},
                )
                response = await client.send(request, stream=True)
                try:
                    if response.has_redirect_location:
                        url = urljoin(url, response.headers["location"])
                        continue
                    if response.status_code != httpx2.codes.OK:
                        raise rpc.invalid(field, f"{field} answered {response.status_code}")
                    return await _read(field, response)
                finally:
                    await response.aclose()
        raise rpc.invalid(field, f"{field} has more than {MAX_REDIRECTS} redirects")

    def _check(self, field: str, url: SplitResult) -> None:
        """Refuse a URL that no pattern allows.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT.
        """
        if not self._patterns:
            raise rpc.invalid(
                field, f"{field} must be a data URL: the router fetches none (--allow-image-urls)"
            )
        allowed = url.scheme == "https" and url.username is None
        if not allowed or not any(pattern.matches(url) for pattern in self._patterns):
            raise rpc.invalid(field, f"{field} is no URL that --allow-image-urls allows")

    async def _address(self, field: str, host: str, port: int) -> str:
        """Return an address of a host.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if one of its addresses is not public.
            OSError: It has none.
        """
        addresses = await look_up(host, port)
        if not all(map(is_public, addresses)):
            raise rpc.invalid(field, f"{field} has a host with an address that is not public")
        return addresses[0]


async def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raise OSError if it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Return whether an address is of the internet, and neither private nor of this machine."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    if parsed in NAT64:
        mapped = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    return (mapped or parsed).is_global and not parsed.is_multicast


async def _read(field: str, response: httpx2.Response) -> bytes:
    """Return a response's body of at most `MAX_BYTES`.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if it is longer.
    """
    # A mapping of its own, as the heap would keep the memory of files that never end.
    with mmap.mmap(-1, MAX_BYTES) as data:
        async for piece in response.aiter_bytes(1 << 16):
            if data.tell() + len(piece) > MAX_BYTES:
                raise rpc.invalid(field, f"{field} may have at most {MAX_BYTES} bytes; it has more")
            data.write(piece)
        return data[: data.tell()]
