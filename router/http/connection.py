"""Limits on size and speed of what a client may send over one HTTP connection.

No setting of uvicorn 0.54 bounds these: it keeps a connection with half a header forever, accepts
headers of 64 MiB, refuses every client once `limit_concurrency` connections have sent part of a
header, and parses any number of pipelined requests at once. Here a request is parsed after the
previous one is answered; until then its bytes wait in the socket's buffer.
"""

import asyncio
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import structlog
from pydantic_core import to_json
from starlette.datastructures import Headers
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.router.http import body
from octavo.router.http.connection_limits import AnonymousPace, OpenConnections
from octavo.router.http.errors import ApiError
from octavo.router.http.headers import REQUEST_ID, new_id, own_id

log = structlog.get_logger(__name__)

HEADER_SECONDS = 10.0
"""Timeout of the TLS handshake, and again of a request's line and headers, in seconds."""
BODY_GRACE_SECONDS = 5.0
"""Seconds to send the error response to a slow body before the connection is closed."""
UNREAD_SECONDS = 5.0
"""Seconds to wait for the unread rest of a refused body."""
MAX_PIPELINED = 64 << 10
"""Maximum buffered bytes of later requests; a client that sends more is disconnected."""
PIECES = 64
"""Maximum pieces of a body to parse before the event loop serves other connections."""

CROWDED = "crowded"
"""ASGI state key: whether the connection uses a reserved file descriptor."""

_EMPTY_LINE = re.compile(rb"\n\r?\n")


class _Phase(enum.Enum):
    """The part of an exchange that a connection is reading or answering."""

    HEADER = enum.auto()
    BODY = enum.auto()
    RESPONSE = enum.auto()


@dataclass(frozen=True, slots=True)
class Shared:
    """The limits that all connections of a server share.

    Attributes:
        connections: The server's open connections.
        pace: Rate limit of requests without a valid key.
        max_header_bytes: Maximum total bytes of a request's line and headers.
        max_body_bytes: Maximum bytes of a body; chunk headers may take as many again.
    """

    connections: OpenConnections
    pace: AnonymousPace
    max_header_bytes: int
    max_body_bytes: int


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with these limits.

    Args:
        shared: The limits, shared by the server's connections.
        address: The client's address, without the port.
        arguments: Arguments of uvicorn's protocol.

    Attributes:
        opening: Task that opens the transport, until it is open.
        known: Whether the last request had a valid key, where one is required.
    """

    def __init__(
        self,
        shared: Shared,
        address: str,
        **arguments: Any,  # noqa: ANN401 - uvicorn's
    ) -> None:
        super().__init__(**arguments)
        self.headers = []
        self._shared = shared
        self._phase = _Phase.HEADER
        self._unparsed = bytearray()
        self._tail = b""  # last 2 parsed bytes, which may begin an empty line
        self._header_bytes = 0
        self._body_left: int | None = None  # None: chunked
        self._chunked_left = 0
        self._held = False
        self._deadline: asyncio.TimerHandle | None = None
        self.address = address
        self.known = False
        self.opening: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection has a transport."""
        return cast("asyncio.Transport | None", self.transport) is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; the TLS handshake is complete."""
        super().connection_made(transport)
        self._set_deadline(HEADER_SECONDS, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        self._shared.connections.leave(self)
        self._cancel_deadline()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes, and parse them if it is their turn."""
        self._unset_keepalive_if_required()
        self._unparsed += data
        self._parse()

    def abort(self) -> None:
        """Close the connection at once, and drop unsent data."""
        if self.is_open:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; drop trailers, which nothing reads."""
        if self._phase is _Phase.HEADER:
            super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's, for people
        """Refuse bytes that are not HTTP."""
        self._refuse(ApiError(400, "the request is not valid HTTP"))

    def on_headers_complete(self) -> None:
        """Start the response."""
        super().on_headers_complete()
        if self.app_state[CROWDED]:
            self.cycle.keep_alive = False
        self._enter(_Phase.BODY)
        self._body_left = _content_length(self.headers)
        self._chunked_left = 2 * self._shared.max_body_bytes
        self._set_deadline(body.SECONDS + BODY_GRACE_SECONDS, self.abort)

    def on_message_complete(self) -> None:
        """Stop reading until the response is complete."""
        super().on_message_complete()
        if self.cycle.response_complete:
            self._enter(_Phase.HEADER)
            self._set_deadline(HEADER_SECONDS, self._too_slow)
        else:
            self._enter(_Phase.RESPONSE)
            self._cancel_deadline()
            self._shared.connections.work(self)

    def on_response_complete(self) -> None:
        """Continue with the next request, if one has arrived."""
        super().on_response_complete()
        self.known = bool(self.cycle.scope["state"].get("known"))
        self._shared.connections.wait(self)
        if self._phase is _Phase.BODY:
            self._set_deadline(UNREAD_SECONDS, self.abort)
            return
        self._enter(_Phase.HEADER)
        delay = 0.0 if self.known else self._shared.pace.hold(self.address)
        self._hold(delay)

    def _parse(self) -> None:
        """Parse the buffered bytes, up to the end of one request."""
        for _ in range(PIECES):
            if self.transport.is_closing():
                self._unparsed.clear()
                return
            if not self._unparsed or self._held or self._phase is _Phase.RESPONSE:
                break
            piece = self._next_piece()
            if self._phase is _Phase.HEADER and not self._admit_header(piece):
                return
            if self._phase is _Phase.BODY and not self._admit_body(piece):
                return
            phase = self._phase
            super().data_received(piece)
            if self._phase is phase:
                self._tail = (self._tail + piece)[-2:]
        else:
            if self._unparsed:
                self._hold(0.0)
        self._regulate()

    def _next_piece(self) -> bytes:
        """Remove and return the bytes that end at or before the current request's end."""
        end = len(self._unparsed)
        if self._phase is _Phase.BODY and self._body_left is not None:
            end = min(end, self._body_left)
            self._body_left -= end
        else:
            end = _end_of_lines(self._tail, self._unparsed)
        piece = bytes(self._unparsed[:end])
        del self._unparsed[:end]
        return piece

    def _admit_header(self, piece: bytes) -> bool:
        """Count a header's bytes; its deadline starts at the first one."""
        if self._deadline is None:
            self._set_deadline(HEADER_SECONDS, self._too_slow)
        maximum = self._shared.max_header_bytes
        left = maximum - self._header_bytes
        self._header_bytes += len(piece)
        if len(piece) <= left:
            return True
        super().data_received(piece[:left])  # the request's id may be in it
        if not self.transport.is_closing():
            self._refuse(ApiError(431, f"the request's headers must have at most {maximum} bytes"))
        return False

    def _admit_body(self, piece: bytes) -> bool:
        """Count a chunked body's bytes; the application sees neither chunk sizes nor trailers."""
        if self._body_left is None:
            self._chunked_left -= len(piece)
            if self._chunked_left < 0:
                self.abort()
                return False
        return True

    def _regulate(self) -> None:
        """Resume reading, unless buffered bytes are still to be parsed."""
        if self._phase is _Phase.RESPONSE and len(self._unparsed) > MAX_PIPELINED:
            self.cycle.keep_alive = False  # dropped requests get no answer
            self._unparsed.clear()
            self.flow.pause_reading()
        elif self._unparsed:
            self.flow.pause_reading()
        elif self._phase is not _Phase.BODY or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _hold(self, seconds: float) -> None:
        """Resume parsing after `seconds`, and after other events of the loop."""
        self._held = True
        self.loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._held = False
        if self._unparsed:
            self._parse()

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._tail = b""
        self._header_bytes = 0
        if phase is _Phase.HEADER:
            self.headers = []

    def _too_slow(self) -> None:
        if self._header_bytes:
            self._refuse(
                ApiError(408, f"the request's headers did not arrive within {HEADER_SECONDS:g} s")
            )
        else:
            self.abort()

    def _refuse(self, error: ApiError) -> None:
        """Refuse a request that could not be parsed, and close the connection.

        The response has the client's request id if that header was read.
        """
        request_id = own_id(Headers(raw=self.headers)) or new_id()
        log.info(
            "request refused unparsed",
            status=error.status,
            reason=str(error),
            http_request_id=request_id,
        )
        content = to_json(error.body)
        head = (
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
            f"connection: close\r\n{REQUEST_ID}: {request_id}\r\n\r\n"
        )
        self._unparsed.clear()
        self.transport.write(STATUS_LINE[error.status] + head.encode() + content)
        self.transport.close()
        self._set_deadline(UNREAD_SECONDS, self.abort)  # the peer's TLS close may never arrive

    def _set_deadline(self, seconds: float, action: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, action)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _end_of_lines(before: bytes, data: bytearray) -> int:
    """Return the end of the first empty line in `data`, or else the end of `data`."""
    across = _EMPTY_LINE.search(before + data[:2])
    if across is not None:
        return across.end() - len(before)
    # Keep no match object: it exports the buffer of `data`, which then cannot shrink.
    return next((line.end() for line in _EMPTY_LINE.finditer(data)), len(data))


def _content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Return a body's length, checked by the parser; None if the body is chunked."""
    names = dict(headers)
    if b"transfer-encoding" in names:
        return None
    return int(names.get(b"content-length", b"0"))
