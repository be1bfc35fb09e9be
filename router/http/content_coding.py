"""Compressed request bodies: the codings of Content-Encoding."""

import zlib
from collections.abc import Callable, Iterator

import zstandard

PIECE = 64
"""Bytes that are inflated at once; zstd makes at most 128 KiB of each 4."""
MAX_WINDOW = 8 << 20
"""Bytes of zstd's window, the most that RFC 9659 allows in HTTP."""
END_OF_ZLIB_HEADER = 2


class CodingError(Exception):
    """The body is not in the coding of its header, or not whole."""


class TooLongError(Exception):
    """The body has more bytes than it may."""


def inflate(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Return the content of a body in a coding of `CODINGS`.

    Inflating stops at `max_bytes`, so that a small body cannot take more memory.

    Raises:
        CodingError: It is not one whole stream of this coding.
        TooLongError: It has more than `max_bytes`.
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
    """Inflate zlib's format, or, as some clients send it, the same without header."""
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
"""What inflates each coding."""
