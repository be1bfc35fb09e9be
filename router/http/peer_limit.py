"""--max-calls-per-peer over HTTP: maximum requests in progress per address."""

from contextlib import ExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.common.rpc import RpcError
from octavo.common.rpc.peer_limit import PeerLimit
from octavo.router.http.errors import from_rpc


class HttpPeerLimit:
    """Refuse POST requests of an address that already has `limit` in progress.

    Args:
        app: The application that serves the other requests.
        limit: Maximum requests in progress per address.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = PeerLimit(limit, "requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        with ExitStack() as stack:
            # Clients of a Unix socket have no address.
            if scope["type"] == "http" and scope["method"] == "POST" and scope["client"]:
                try:
                    stack.enter_context(self._limit.counted(scope["client"][0]))
                except RpcError as error:
                    await from_rpc(error).response(scope)(scope, receive, send)
                    return
            await self._app(scope, receive, send)
