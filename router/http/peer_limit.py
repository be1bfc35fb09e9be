"""--max-calls-per-peer over HTTP: maximum requests in progress per address."""

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.common.peer_limit import RETRY_SECONDS
from octavo.router.http.errors import ApiError


class HttpPeerLimit:
    """Refuse POST requests of an address that already has `limit` in progress.

    Args:
        app: The application that serves the other requests.
        limit: Maximum requests in progress per address.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._calls: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        # Clients of a Unix socket have no address.
        if scope["type"] != "http" or scope["method"] != "POST" or scope["client"] is None:
            await self._app(scope, receive, send)
            return
        address = scope["client"][0]
        if self._calls[address] >= self._limit:
            await self._refusal(address).response()(scope, receive, send)
            return
        self._calls[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]

    def _refusal(self, address: str) -> ApiError:
        return ApiError(
            429,
            f"{self._limit} requests of {address} are in progress, the maximum per address "
            "(--max-calls-per-peer); retry when one has ended",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": f"{RETRY_SECONDS:g}"},
        )
