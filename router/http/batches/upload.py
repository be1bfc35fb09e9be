"""Reads an uploaded file: a body of type multipart/form-data, written to the disk as it comes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from octavo.router.http.body import SECONDS, ClientLeftError
from octavo.router.http.errors import ApiError

MAX_FIELD = 4096
"""Maximum bytes of a field, or of a part's header."""
MAX_FIELDS = 16
CHECK_BYTES = 1 << 20
"""Bytes between checks that there is room for more."""


class Upload:
    """The parts of an upload: its file, written to `sink`, and its fields.

    Attributes:
        fields: The values of fields, by name.
        filename: The file's name; None before there is a file.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self._sink = sink
        self._header = bytearray()
        self._value = bytearray()
        self._value_of: bytearray | None = None  # None: the file
        self._options: dict[bytes, bytes] = {}

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """Read a part of a header's name."""
        self._header += data[start:end]
        self._check(len(self._header))

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Read a part of a header's value."""
        self._value += data[start:end]
        self._check(len(self._value))

    def on_header_end(self) -> None:
        """Keep a part's name; other headers say nothing of interest."""
        if self._header.lower() == b"content-disposition":
            _, self._options = parse_options_header(bytes(self._value))
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        """Begin a field or the file."""
        name = self._options.get(b"name", b"").decode(errors="replace")
        if b"filename" in self._options or name == "file":
            if self.filename is not None:
                raise FormParserError("there is more than one file")
            self.filename = self._options.get(b"filename", b"").decode(errors="replace")
            self._value_of = None
        else:
            self._value_of = self.fields.setdefault(name, bytearray())

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Read a part of a field or of the file."""
        if self._value_of is None:
            self._sink.write(data[start:end])
            return
        self._value_of += data[start:end]
        self._check(len(self._value_of))

    def _check(self, size: int) -> None:
        if size > MAX_FIELD or len(self.fields) > MAX_FIELDS:
            raise FormParserError("it has more, or longer, fields than are known")


async def read_upload(request: Request, path: Path, left: Callable[[], int]) -> Upload:
    """Write the file of a body to `path`, and return the rest.

    Args:
        request: The request.
        path: The file to write.
        left: Returns the number of bytes that files may still take, this one counted.

    Raises:
        ApiError: The body is not such a form, too long, or too slow to arrive.
        ClientLeftError: The client disconnected.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise ApiError(415, "the body must be a form, with Content-Type: multipart/form-data")
    with path.open("wb") as sink:
        upload = Upload(sink)
        names = ("header_field", "header_value", "header_end", "headers_finished", "part_data")
        callbacks = {f"on_{name}": getattr(upload, f"on_{name}") for name in names}
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(SECONDS):
                unchecked = CHECK_BYTES
                async for chunk in request.stream():
                    parser.write(chunk)
                    unchecked += len(chunk)
                    if unchecked > CHECK_BYTES:
                        unchecked = 0
                        _check_room(left())
            parser.finalize()
            sink.flush()
            _check_room(left())
        except FormParserError as error:
            raise ApiError(400, f"the body is not a form: {error}") from None
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {SECONDS:g} s") from None
        except ClientDisconnect:
            raise ClientLeftError from None
    return upload


def _check_room(left: int) -> None:
    if left < 0:
        raise ApiError(413, "the file exceeds the router's --batch-space: delete files first")
