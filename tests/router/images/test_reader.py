"""Requests hold processed images in bounded memory."""

import asyncio
import gc
import io

import pytest
from PIL import Image

from octavo.common.models.tokenizer import load_tokenizer
from octavo.common.rpc import RpcError, invalid
from octavo.router import image_reader
from octavo.router.image_reader import ImageReader
from octavo.router.images.processor import load_processor
from octavo.router.tenants.tenant import Tenant
from octavo.v1.generation_pb2 import ImagePart
from tests.vision_models import save_vision_model


def part(shade):
    file = io.BytesIO()
    Image.new("RGB", (30, 20), (shade, 0, 0)).save(file, "PNG")
    return ImagePart(data=file.getvalue())


async def test_images_that_requests_hold_are_bounded_and_the_latest_are_kept(tmp_path, monkeypatch):
    save_vision_model("llava", tmp_path)
    processor = load_processor(tmp_path, load_tokenizer(tmp_path))
    reader, tenant = ImageReader([]), Tenant("a")
    monkeypatch.setattr(image_reader, "MAX_HELD", 20_000)  # of 12 KB each
    held = [await reader.read("x", part(shade), processor, tenant) for shade in (1, 2)]
    assert await reader.read("x", part(2), processor, tenant) is held[1]
    with pytest.raises(RpcError, match="too many images"):
        await reader.read("x", part(3), processor, tenant)
    with pytest.raises(RpcError, match="too many images"):  # not the image of another tenant
        await reader.read("x", part(2), processor, Tenant("b"))
    reader._latest = image_reader.ImageStore(0)
    held.clear()
    gc.collect()  # tasks that read them may be in cycles
    assert await reader.read("x", part(3), processor, tenant)
    reader.close()


async def test_few_urls_are_fetched_at_a_time(monkeypatch):
    reader, running, most = ImageReader([]), 0, 0

    async def fetch(field, url):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        raise invalid(field, f"{field} cannot be fetched: {url}")

    monkeypatch.setattr(reader._fetcher, "fetch", fetch)
    parts = [ImagePart(url=f"https://a.test/{number}") for number in range(100)]
    reads = [reader.read(str(i), part, None, Tenant("a")) for i, part in enumerate(parts)]
    refused = await asyncio.gather(*reads, return_exceptions=True)
    assert [each.field for each in refused] == [f"{number}.url" for number in range(100)]
    assert most == image_reader.FETCHES
    reader.close()
