"""Reads the images of requests in threads, outside the event loop."""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from octavo.common import rpc
from octavo.common.background import ThreadPool
from octavo.common.image_store import ImageStore
from octavo.router.images.decode import decode, is_data_url, read_data_url
from octavo.router.images.fetch import Fetcher
from octavo.router.images.url_pattern import UrlPattern
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.turns import Turns
from octavo.v1 import generation_pb2

if TYPE_CHECKING:  # slow to import
    from octavo.router.images.processor import ImageProcessor, ProcessedImage

THREADS = 2
"""Number of threads; one of them takes no large images."""
LARGE = 1 << 20
"""Bytes of a large image."""
FETCHES, WAITING_FETCHES = 32, 1024
"""Maximum fetches at a time, of files up to 20 MiB each, and waiting ones of a tenant."""
KEPT_BYTES = 128 << 20
"""Bytes of processed images that are kept for further questions about them."""
MAX_HELD = 1 << 30
"""Bytes of processed images that requests hold, above which no more are processed."""
RETRY_SECONDS = 2.0
"""Retry delay when they do."""
MAX_WAITING = 256 << 20
"""Maximum bytes of one tenant's waiting images."""


class ImageReader:
    """Fetches, decodes and processes images, for tenants in turns.

    Args:
        allowed_urls: Patterns of https URLs that images are fetched from.
    """

    def __init__(self, allowed_urls: Sequence[str]) -> None:
        self._fetcher = Fetcher([UrlPattern.parse(text) for text in allowed_urls])
        self._fetches = Turns(FETCHES, 1, WAITING_FETCHES)
        self._threads = ThreadPool(THREADS, "images")
        self._turns = Turns(THREADS, LARGE, MAX_WAITING)
        self._latest = ImageStore["ProcessedImage"](KEPT_BYTES)
        self._alive = WeakSet["ProcessedImage"]()

    async def read(
        self,
        field: str,
        part: generation_pb2.ImagePart,
        processor: "ImageProcessor",
        tenant: Tenant,
        *,
        alone: bool = True,
    ) -> "ProcessedImage":
        """Return an image as a model's vision encoder takes it.

        Args:
            field: The image's place in the request.
            part: The image.
            processor: The model's processor.
            tenant: The request's tenant.
            alone: Whether the prompt has no other image.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if it is no image that can be shown; RESOURCE_EXHAUSTED
                if requests hold too many; see `Turns.run`.
        """
        data, media_type = part.data, part.media_type
        match part.WhichOneof("source"):
            case None:
                raise rpc.invalid(field, f"{field} must have data or url")
            case "url":
                field = f"{field}.url"
                if not is_data_url(part.url):
                    fetch = partial(self._fetcher.fetch, field, part.url)
                    data = await self._fetches.run(tenant, 1, fetch, "image's fetch")
        of_url = "" if data else part.url
        # The time of an answer must not tell what other tenants have sent.
        known = hashlib.sha256(f"{tenant.name}\0{processor.id}\0{media_type}\0".encode())
        known.update(b"\1" if alone or not processor.counts else b"\0")
        known.update(data or of_url.encode())
        key = known.digest()
        if (kept := self._latest.find(key)) is not None:
            return kept
        if sum(len(image.tensors) for image in self._alive) > MAX_HELD:
            raise rpc.exhausted("too many images wait for an engine; try again", RETRY_SECONDS)

        def process() -> "ProcessedImage":
            file, kind = read_data_url(field, of_url) if of_url else (data, "")
            return processor.process(field, decode(field, file, media_type or kind), alone=alone)

        size = len(data) + len(of_url)
        image = await self._turns.run(tenant, size, lambda: self._threads.run(process), "image")
        self._alive.add(image)
        self._latest.add(key, len(image.tensors), image)
        return image

    def close(self) -> None:
        """Stop the threads without waiting for running work."""
        self._threads.close()
