"""Connections that break HTTP/2's rules or flood the server with it."""

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from benchmarks.fuzz import messages
from benchmarks.fuzz.calls import ENGINE, GENERATION
from octavo.v1 import engine_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
READ_SECONDS = 0.3
"""Seconds to read an answer; its contents do not matter."""
FLOOD = 500
"""Number of frames in a flood."""
BOMB_BYTES = 1 << 20


class Wire:
    """A connection to a server, and the call to make."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
    ) -> None:
        self._reader = reader
        self._writer = writer
        self.path = path
        self.body = body

    def send(self, *parts: bytes | Frame) -> None:
        """Send bytes and frames.

        Raises:
            ConnectionError: The server has closed the connection.
        """
        if self._writer.is_closing():
            raise ConnectionResetError
        for part in parts:
            self._writer.write(part.serialize() if isinstance(part, Frame) else part)

    def greet(self) -> None:
        """Send a client's preface."""
        self.send(PREFACE, SettingsFrame(0))

    def call(self, stream: int, *, end: bool = True, path: str | None = None) -> None:
        """Begin a call and send its request."""
        self.send(
            headers(stream, request_headers(path or self.path)),
            data(stream, struct.pack(">BI", 0, len(self.body)) + self.body, end=end),
        )

    async def listen(self, seconds: float = READ_SECONDS) -> None:
        """Send buffered bytes and read for a while."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._writer.drain()
                while await self._reader.read(1 << 16):
                    pass

    def close(self, *, rudely: bool) -> None:
        """Close the connection, or abort it."""
        if rudely:
            self._writer.transport.abort()
        else:
            self._writer.close()


def headers(stream: int, fields: list[tuple[str, str]], *flags: str) -> HeadersFrame:
    """Return a HEADERS frame."""
    block = hpack.Encoder().encode(fields)
    return HeadersFrame(stream, block, flags=["END_HEADERS", *flags])


def data(stream: int, body: bytes, *, end: bool = False) -> DataFrame:
    """Return a DATA frame."""
    return DataFrame(stream, body, flags=["END_STREAM"] if end else [])


def request_headers(path: str) -> list[tuple[str, str]]:
    """Return the headers of a call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "fuzz"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]


# Attacks.


async def noise(wire: Wire, rng: random.Random) -> None:
    """Send random bytes."""
    wire.send(rng.randbytes(rng.randrange(1, 3000)))


async def noise_after_preface(wire: Wire, rng: random.Random) -> None:
    """Send random bytes after the preface."""
    wire.greet()
    wire.send(rng.randbytes(rng.randrange(1, 3000)))


async def http1(wire: Wire, rng: random.Random) -> None:  # noqa: ARG001 - as in all attacks
    """Send HTTP/1.1."""
    wire.send(b"GET / HTTP/1.1\r\nHost: fuzz\r\nUpgrade: h2c\r\n\r\n")


async def random_frames(wire: Wire, rng: random.Random) -> None:
    """Send frames of any kind, on any stream, in any order."""
    wire.greet()
    for _ in range(rng.randrange(1, 40)):
        body = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 100)))
        stream = rng.choice((0, 1, 2, 3, (1 << 31) - 1))
        head = struct.pack(">I", len(body))[1:] + bytes([rng.randrange(12), rng.randrange(256)])
        wire.send(head + struct.pack(">I", stream) + body)


async def truncated_frame(wire: Wire, rng: random.Random) -> None:
    """Send a part of a frame."""
    wire.greet()
    whole = headers(1, request_headers(wire.path)).serialize()
    wire.send(whole[: rng.randrange(1, len(whole))])


async def broken_hpack(wire: Wire, rng: random.Random) -> None:
    """Send headers that do not decode."""
    wire.greet()
    block = bytearray(hpack.Encoder().encode(request_headers(wire.path)))
    for _ in range(rng.randint(1, 8)):
        block[rng.randrange(len(block))] = rng.randrange(256)
    wire.send(HeadersFrame(1, bytes(block), flags=["END_HEADERS", "END_STREAM"]))


async def header_bomb(wire: Wire, rng: random.Random) -> None:  # noqa: ARG001
    """Send a long header and thousands of references to it."""
    wire.greet()
    encoder = hpack.Encoder()
    long = encoder.encode([("x", "y" * 3900)])
    again = encoder.encode([("x", "y" * 3900)])
    wire.send(HeadersFrame(1, encoder.encode(request_headers(wire.path)) + long))
    for _ in range(64):
        wire.send(ContinuationFrame(1, again * 128))
    wire.send(ContinuationFrame(1, b"", flags=["END_HEADERS"]))


async def endless_headers(wire: Wire, rng: random.Random) -> None:
    """Send headers without an end."""
    wire.greet()
    wire.send(HeadersFrame(1, hpack.Encoder().encode(request_headers(wire.path))))
    block = hpack.Encoder().encode([(f"x-{i}", "y" * 50) for i in range(200)])
    for _ in range(rng.choice((3, BOMB_BYTES // len(block)))):
        wire.send(ContinuationFrame(1, block))


async def settings_flood(wire: Wire, rng: random.Random) -> None:
    """Send hundreds of SETTINGS."""
    wire.greet()
    for _ in range(FLOOD):
        wire.send(SettingsFrame(0, {rng.randrange(1, 8): rng.randrange(1 << 16)}))


async def ping_flood(wire: Wire, rng: random.Random) -> None:
    """Send hundreds of PINGs."""
    wire.greet()
    wire.send(*(PingFrame(0, rng.randbytes(8)) for _ in range(FLOOD)))


async def rapid_reset(wire: Wire, rng: random.Random) -> None:
    """Reset calls at once: they hold no stream, but cost the server work."""
    wire.greet()
    for i in range(FLOOD):
        wire.call(2 * i + 1, end=rng.random() < 0.5)
        wire.send(RstStreamFrame(2 * i + 1, rng.randrange(14)))


async def window_flood(wire: Wire, rng: random.Random) -> None:
    """Enlarge windows by 1 and beyond their limit."""
    wire.greet()
    wire.call(1)
    for _ in range(FLOOD):
        window = WindowUpdateFrame(rng.choice((0, 1)))
        window.window_increment = rng.choice((1, (1 << 31) - 1))
        wire.send(window)


async def priority_flood(wire: Wire, rng: random.Random) -> None:
    """Make streams depend on others and on themselves."""
    wire.greet()
    for _ in range(FLOOD):
        stream = rng.randrange(1, 2000, 2)
        wire.send(PriorityFrame(stream, depends_on=rng.choice((0, stream + 2)), stream_weight=1))


async def data_nowhere(wire: Wire, rng: random.Random) -> None:
    """Send data on streams that are not open, or past their window."""
    wire.greet()
    wire.call(1)
    for _ in range(rng.choice((1, 20))):
        wire.send(data(rng.choice((1, 3, 5)), rng.randbytes(16_000)))


async def odd_calls(wire: Wire, rng: random.Random) -> None:
    """Send calls with headers or framing that gRPC does not allow."""
    wire.greet()
    for stream in range(1, 41, 2):
        fields = request_headers(wire.path)
        i = rng.randrange(len(fields))
        odd = ("", "x", "\0", "/", "PUT", "application/grpc+proto", "é", "z" * 2000)
        match rng.randrange(4):
            case 0:
                del fields[i]
            case 1:
                fields[i] = (fields[i][0], rng.choice(odd))
            case 2:
                fields += [
                    (rng.choice(("grpc-timeout", "grpc-encoding", "x-bin")), rng.choice(odd))
                ]
            case 3:
                fields.append(fields[i])
        length = rng.choice((0, 1, len(wire.body), len(wire.body) + 9, 1 << 31, (1 << 32) - 1))
        framing = struct.pack(">BI", rng.choice((0, 0, 1, 2, 255)), length)
        wire.send(headers(stream, fields), data(stream, framing + wire.body, end=True))


async def never_reading(wire: Wire, rng: random.Random) -> None:
    """Send calls with a closed window, so that the server may send no answer."""
    wire.send(PREFACE, SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
    for stream in range(1, 21, 2):
        wire.call(stream)
    await wire.listen(rng.uniform(0, 1))


async def half_a_call(wire: Wire, rng: random.Random) -> None:
    """Send calls with requests that never end."""
    wire.greet()
    for stream in range(1, 101, 2):
        wire.send(headers(stream, request_headers(wire.path)))
        wire.send(data(stream, struct.pack(">BI", 0, 1 << 20) + rng.randbytes(100)))


async def silence(wire: Wire, rng: random.Random) -> None:
    """Send part of a preface or nothing, then wait a while."""
    wire.send(PREFACE[: rng.randrange(len(PREFACE))])
    await wire.listen(rng.uniform(0, 2))


Attack = Callable[[Wire, random.Random], Awaitable[None]]
ATTACKS: tuple[Attack, ...] = (
    *(noise, noise_after_preface, http1, random_frames, truncated_frame, broken_hpack),
    *(header_bomb, endless_headers, settings_flood, ping_flood, rapid_reset, window_flood),
    *(priority_flood, data_nowhere, odd_calls, never_reading, half_a_call, silence),
)


async def attack(rng: random.Random, router: int, engine: int) -> str:
    """Attack the router's or the engine's port once; return the attack's name.

    Raises:
        OSError: Nothing listens there.
    """
    chosen = rng.choice(ATTACKS)
    at_router = rng.random() < 0.6
    if at_router:
        path, body = f"{GENERATION}Generate", messages.generate(rng).SerializeToString()
    else:
        order = engine_pb2.SessionRequest(submit=messages.submit(rng))
        path, body = f"{ENGINE}Session", order.SerializeToString()
    reader, writer = await asyncio.open_connection("127.0.0.1", router if at_router else engine)
    wire = Wire(reader, writer, path, body)
    try:
        with suppress(OSError):  # expected: the server cut the connection
            await chosen(wire, rng)
            await wire.listen()
    finally:
        wire.close(rudely=rng.random() < 0.5)
    return chosen.__name__
