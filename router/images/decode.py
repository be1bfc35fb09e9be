"""Decodes images, and refuses what would be shown wrongly or take too much memory."""

import base64
import binascii
import re
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from octavo.common import rpc

MAX_BYTES = 20 << 20
"""Maximum size of an image's file."""
MAX_PIXELS = 50_000_000
"""Maximum pixels of an image, which take 3 bytes each once decoded."""
MEDIA_TYPES = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
}
"""Media types by Pillow's names of formats; MPO is a JPEG file with more images behind it."""
DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?:;[^,;=]+=[^,;]*)*;base64,", re.ASCII)


def is_data_url(url: str) -> bool:
    """Return whether a URL has the data itself."""
    return url[:5].lower() == "data:"


def read_data_url(field: str, url: str) -> tuple[bytes, str]:
    """Return a data URL's data and media type.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT.
    """
    if (match := DATA_URL.match(url)) is None:
        raise rpc.invalid(field, f"{field} must be data:MEDIA_TYPE;base64,DATA")
    check_size(field, (len(url) - match.end()) * 3 // 4 - 2)
    try:
        return base64.b64decode(url[match.end() :], validate=True), match["type"]
    except (binascii.Error, ValueError) as error:
        raise rpc.invalid(field, f"{field} is not base64: {error}") from None


def check_size(field: str, size: int) -> None:
    """Refuse a file of more than `MAX_BYTES`.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT.
    """
    if size > MAX_BYTES:
        raise rpc.invalid(field, f"{field} may have at most {MAX_BYTES} bytes; it has {size}")


def decode(field: str, data: bytes, media_type: str) -> Image.Image:
    """Return an image in RGB, as its EXIF orientation says.

    Args:
        field: The image's place in the request.
        data: Its file.
        media_type: The type that it should have; empty: any.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT.
    """
    if not data:
        raise rpc.invalid(field, f"{field} is empty")
    check_size(field, len(data))
    if media_type and media_type not in MEDIA_TYPES.values():
        allowed = ", ".join(sorted({*MEDIA_TYPES.values()}))
        raise rpc.invalid(field, f"{field} must be one of {allowed}; it is {media_type[:64]!r}")
    try:
        with Image.open(BytesIO(data), formats=["PNG", "JPEG", "WEBP", "GIF"]) as image:
            _check(field, image, media_type)
            image.load()
            shown = ImageOps.exif_transpose(image)
            return shown.convert("RGB")
    except rpc.RpcError:
        raise
    except UnidentifiedImageError:
        raise rpc.invalid(field, f"{field} is no PNG, JPEG, WebP or GIF file") from None
    except Image.DecompressionBombError:
        raise _too_large(field) from None
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise many types
        raise rpc.invalid(field, f"{field} cannot be decoded: {error}") from None


def _check(field: str, image: Image.Image, media_type: str) -> None:
    """Check what a file's header says, before its pixels are decoded."""
    found = MEDIA_TYPES[image.format or ""]
    if media_type and media_type != found:
        raise rpc.invalid(field, f"{field} is {found}, not {media_type} as its media type says")
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(field, f"; it has {image.width} x {image.height}")
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise rpc.invalid(field, f"{field} is animated; send one frame of it")
    if image.mode.startswith(("I", "F")):
        raise rpc.invalid(field, f"{field} has more than 8 bits a channel; send it with 8")


def _too_large(field: str, has: str = "") -> rpc.RpcError:
    return rpc.invalid(field, f"{field} may have at most {MAX_PIXELS} pixels{has}")
