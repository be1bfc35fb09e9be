"""The images that an engine keeps for a router: the same ones on both sides.

Router and engine apply the same commands in the same order, so the router knows what the engine
has without asking.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class ImageStore(Generic[Kept]):
    """Keeps the images sent or named last, up to a number of bytes, but always the latest.

    Args:
        capacity: Maximum bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._images: OrderedDict[bytes, tuple[int, Kept]] = OrderedDict()
        self._bytes = 0

    def add(self, digest: bytes, size: int, kept: Kept) -> None:
        """Keep an image of `size` bytes; drop the ones used least recently."""
        if digest in self._images:
            self._bytes -= self._images.pop(digest)[0]
        self._images[digest] = size, kept
        self._bytes += size
        while self._bytes > self._capacity and len(self._images) > 1:
            self._bytes -= self._images.popitem(last=False)[1][0]

    def has(self, digest: bytes) -> bool:
        """Return whether an image is kept, which is then the one used last."""
        if digest in self._images:
            self._images.move_to_end(digest)
        return digest in self._images

    def find(self, digest: bytes) -> Kept | None:
        """Return an image, which is then the one used last; None if it is not kept."""
        return self._images[digest][1] if self.has(digest) else None
