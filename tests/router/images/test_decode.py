"""Images are shown as they are, or refused with a precise reason before they take memory."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from octavo.common.rpc import RpcError
from octavo.router.images.decode import MAX_BYTES, decode, read_data_url

NOISE = np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8)


def file(image, kind, **options):
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


RGB = Image.fromarray(NOISE)
PNG, JPEG, WEBP, GIF = (file(RGB, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF"))
FRAMES = {"save_all": True, "append_images": [RGB.rotate(90), RGB.rotate(180)]}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, data=b"", *, depth=8, colour=2):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


BAD = {
    "empty": (b"", "", "is empty"),
    "text": (b"a cat", "", "is no PNG, JPEG, WebP or GIF file"),
    "zeros": (bytes(1000), "", "is no PNG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "must be one of"),
    "svg as png": (b"<svg/>", "image/png", "is no PNG"),
    "html": (b"<html>cat.png</html>", "text/html", "must be one of"),
    "bmp": (file(RGB, "BMP"), "", "is no PNG"),
    "tiff": (file(RGB, "TIFF"), "", "is no PNG"),
    "ico": (file(RGB, "ICO"), "image/x-icon", "must be one of"),
    "pdf": (b"%PDF-1.7\n1 0 obj", "application/pdf", "must be one of"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "", "is no PNG"),
    "zip": (b"PK\x03\x04" + bytes(60), "", "is no PNG"),
    "png as jpeg": (PNG, "image/jpeg", "is image/png, not image/jpeg"),
    "jpeg as png": (JPEG, "image/png", "is image/jpeg, not image/png"),
    "gif as webp": (GIF, "image/webp", "is image/gif, not image/webp"),
    "png header alone": (PNG[:33], "", "cannot be decoded|is no PNG"),
    "png cut": (PNG[:-40], "", "cannot be decoded"),
    "jpeg cut": (JPEG[: len(JPEG) // 2], "", "cannot be decoded"),
    "webp cut": (WEBP[: len(WEBP) // 2], "", "cannot be decoded|is no PNG"),
    "gif cut": (GIF[:60], "", "cannot be decoded|is no PNG"),
    "png with a wrong checksum": (PNG[:45] + b"\0\0" + PNG[47:], "", "cannot be decoded|is no PNG"),
    "jpeg without an end of its header": (JPEG[:20], "", "cannot be decoded|is no PNG"),
    "no width": (png(0, 10), "", "cannot be decoded|is no PNG"),
    "no height": (png(10, 0), "", "cannot be decoded|is no PNG"),
    "100 MP": (png(10_000, 10_000), "", "at most 50000000 pixels; it has 10000 x 10000"),
    "bomb": (png(60_000, 60_000), "", "at most 50000000 pixels"),
    "a line": (png(2**31 - 1, 1), "", "at most 50000000 pixels"),
    "less data than pixels": (png(900, 900, bytes(90)), "", "cannot be decoded"),
    "16 bits": (file(Image.fromarray(NOISE[..., 0].astype(np.uint16)), "PNG"), "", "8 bits"),
    "animated gif": (file(RGB, "GIF", **FRAMES), "", "is animated"),
    "animated webp": (file(RGB, "WEBP", **FRAMES), "", "is animated"),
    "animated png": (file(RGB, "PNG", **FRAMES), "", "is animated"),
    "too many bytes": (PNG + bytes(MAX_BYTES), "", "at most"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_shown_is_refused_before_it_takes_memory(name):
    data, media_type, why = BAD[name]
    tracemalloc.start()
    try:
        with pytest.raises(RpcError, match=why) as refused:
            decode("the image", data, media_type)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert refused.value.field == "the image"
    assert refused.value.message.startswith("the image ")


def test_a_turned_image_is_shown_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    shown = decode("x", file(RGB, "PNG", exif=exif), "image/png")
    assert np.array_equal(np.asarray(shown), np.rot90(NOISE, -1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_all_colours_of_8_bits_become_rgb(mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = RGB.convert(mode)
    data = file(image, kind, **({"quality": 100, "subsampling": 0} if mode == "CMYK" else {}))
    shown = np.asarray(decode("x", data, "")).astype(int)
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(shown - expected).max() <= (12 if mode == "CMYK" else 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png,abc", "must be data:MEDIA_TYPE;base64,DATA"),
        ("data:image/png;base64,a$b=", "is not base64"),
        ("data:image/png;base64,abc", "is not base64"),
        ("data:", "must be data:"),
        ("data:image/png;base64," + "A" * (MAX_BYTES * 4 // 3 + 100), "at most"),
    ],
)
def test_a_data_url_that_has_no_data_is_refused(url, why):
    with pytest.raises(RpcError, match=why):
        read_data_url("the url", url)
