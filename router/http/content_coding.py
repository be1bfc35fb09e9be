"""Compressed request bodies: the codings of Content-Encoding."""

import zlib
from collections.abc import Callable, Iterator

import zstandard

PIECE = 64
"""Bytes inflated per turn; zstd expands each 4 to at most 128 KiB."""
MAX_WINDOW = 8 << 20
"""Bytes of zstd's window: the maximum for HTTP (RFC 9659)."""
END_OF_ZLIB_HEADER = 2


class CodingError(Exception):
    """The body is truncated, or not in the coding that its header names."""


class TooLongError(Exception):
    """The body exceeds its maximum size."""


def inflate(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Inflate a body that is compressed with one of `CODINGS`.

    Inflating stops at `max_bytes`, so that a small body cannot take more memory.

    Raises:
        CodingError: The body is not one whole stream of this coding.
        TooLongError: The content exceeds `max_bytes`.
    """
    inflated = bytearray()
    try:
        for part in CODINGS[coding](body, max_bytes + 1):
            inflated += part
            if len(inflated) > max_bytes:
                raise TooLongError
    except (zlib.error, zstandard.ZstdError) as error:
        raise CodingError(str(error)) from None
    return bytes(inflated)


def _gzip(body: bytes, max_bytes: int) -> Iterator[bytes]:
    return _zlib(body, max_bytes, zlib.MAX_WBITS | 16)


def _deflate(body: bytes, max_bytes: int) -> Iterator[bytes]:
    """Inflate zlib's format, or raw deflate, which some clients send."""
    header = int.from_bytes(body[:END_OF_ZLIB_HEADER])
    has_header = body[:1] and body[0] & 15 == zlib.DEFLATED and header % 31 == 0
    return _zlib(body, max_bytes, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def _zlib(body: bytes, max_bytes: int, window: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(window)
    part = stream.decompress(body, max_bytes)
    yield part
    if len(part) < max_bytes:
        _check_end(stream.eof, stream.unused_data)


def _zstd(body: bytes, max_bytes: int) -> Iterator[bytes]:  # noqa: ARG001 - its pieces are small
    stream = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
    for start in range(0, len(body), PIECE):
        if stream.eof:
            raise CodingError("more follows its end")
        yield stream.decompress(body[start : start + PIECE])
    _check_end(stream.eof, stream.unused_data)


def _check_end(ended: bool, rest: bytes) -> None:
    if not ended:
        raise CodingError("it is cut short")
    if rest:
        raise CodingError("more follows its end")


CODINGS: dict[str, Callable[[bytes, int], Iterator[bytes]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
"""Decompressor of each coding."""
