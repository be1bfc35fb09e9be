"""Encodes the images of prompts, for a bounded time in each step."""

import time
from collections.abc import Collection, Mapping
from functools import partial

import structlog
import torch

from octavo.common.pausable import PausableCall
from octavo.engine.models.vision import Vision
from octavo.engine.scheduling.image_encodes import ImageKey
from octavo.engine.scheduling.request import PromptImage

log = structlog.get_logger(__name__)

SECONDS = 0.1
"""Time in a step after which encoding pauses on a CPU, before the encoder's next layer: so long do
the other requests wait for their tokens. A GPU encodes in milliseconds."""


class ImageEncoder:
    """Encodes images one after another; the last one of a step may be paused within.

    Args:
        vision: The model's vision part.

    Attributes:
        embeddings: Embeddings of the encoded images; see `Vision.encode`.
    """

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._pauses = vision.weights[0].device.type == "cpu"
        self._begun: tuple[ImageKey, PausableCall[torch.Tensor]] | None = None
        self._done: set[ImageKey] = set()
        self._failed: set[ImageKey] = set()
        self.embeddings: dict[ImageKey, torch.Tensor] = {}

    def encode(self, images: Mapping[ImageKey, PromptImage], dropped: Collection[ImageKey]) -> None:
        """Encode a step's images in order, as far as the time allows.

        Args:
            images: The images.
            dropped: Encoded or begun images to drop before.
        """
        for key in dropped:
            self.embeddings.pop(key, None)
        if self._begun is not None and self._begun[0] not in images:
            self.end()
        until = time.perf_counter() + SECONDS
        for key, image in images.items():
            try:
                encoded = self._continue(key, image, until)
            except Exception:
                log.exception("image not encoded", image=image.span.digest.hex()[:16])
                self._failed.add(key)
                self._begun = None
                continue
            if encoded is None:
                return
            self.embeddings[key] = encoded
            self._done.add(key)

    def _continue(self, key: ImageKey, image: PromptImage, until: float) -> torch.Tensor | None:
        """Begin or continue an image; return its embeddings, or None if it is paused."""
        encode = partial(self._vision.encode, image.tensors, len(image.places))
        if not self._pauses:
            return encode()
        call = PausableCall(encode, "image encoder")
        if self._begun is not None and self._begun[0] == key:
            _, call = self._begun
        self._begun = key, call
        for encoded in call.run(until - time.perf_counter()):
            self._begun = None
            return encoded
        return None

    def take_ended(self) -> tuple[set[ImageKey], set[ImageKey]]:
        """Return the images encoded since the last call, and those that the encoder failed on."""
        ended = self._done, self._failed
        self._done, self._failed = set(), set()
        return ended

    def end(self) -> None:
        """End an image that is paused."""
        if self._begun is not None:
            self._begun[1].end()
            self._begun = None
