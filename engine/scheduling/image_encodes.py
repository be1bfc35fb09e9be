"""Which images each step encodes, and which encoded ones are kept."""

from collections import OrderedDict
from collections.abc import Collection

from octavo.engine.kv_cache import Span
from octavo.engine.scheduling.request import PromptImage, Request

ImageKey = tuple[str, bytes]
"""A request's salt and an image's digest: only requests of one salt share encoded images, as the
speed of an answer must not tell what others have sent."""


def image_key(request: Request, image: PromptImage) -> ImageKey:
    """Return the key of a request's image."""
    return request.cache_salt, image.span.digest


class ImageEncodes:
    """Chooses the images that a step encodes, and those that stay encoded: the last ones used.

    Args:
        max_tokens: Maximum tokens of images that a step encodes, but at least one image.
        kept_tokens: Tokens of encoded images that are kept.
        longest_whole: Maximum tokens of an image that a chunk must not end within; 0: it may.

    Attributes:
        chosen: The images that the step encodes.
        longest_whole: See above.
    """

    def __init__(self, max_tokens: int, kept_tokens: int, longest_whole: int = 0) -> None:
        self._max_tokens = max_tokens
        self._kept_tokens = kept_tokens
        self.longest_whole = longest_whole
        self._held: OrderedDict[ImageKey, int] = OrderedDict()
        self._used: set[ImageKey] = set()
        self._forgotten: list[ImageKey] = []
        self.chosen: dict[ImageKey, PromptImage] = {}

    def begin_step(self) -> None:
        """Forget what the step before encodes."""
        self.chosen, self._used = {}, set()

    def fit(self, request: Request, spans: list[Span], used: int) -> tuple[list[Span], int]:
        """Choose the images of chunks of a prompt; shorten chunks before one that must wait.

        Args:
            request: The prompt's request.
            spans: The chunks.
            used: Their share of the prefill budget.

        Returns:
            The chunks that are left, and their share.
        """
        if not request.images:
            return spans, used
        fitting = [self._fit(request, span) for span in spans]
        used -= sum(span.end - fit.end for span, fit in zip(spans, fitting, strict=True))
        return [span for span in fitting if span.end > span.start], used

    def _fit(self, request: Request, span: Span) -> Span:
        end = span.end
        for image in request.images:
            start = image.span.start
            if image.span.end <= span.start or start >= end:
                continue
            key, tokens = image_key(request, image), len(image.places)
            if self.longest_whole and image.span.end > end:
                return span._replace(end=max(start, span.start))
            if key not in self._held:
                planned = sum(len(other.places) for other in self.chosen.values())
                if self.chosen and planned + tokens > self._max_tokens:
                    return span._replace(end=max(start, span.start))
                self.chosen[key] = image
            self._held[key] = tokens
            self._held.move_to_end(key)
            self._used.add(key)
        return span

    def forget(self, failed: Collection[ImageKey] | None = None) -> None:
        """Forget the images whose encoding failed; None: all, because a step failed."""
        forgotten = self._held.keys() if failed is None else failed
        self._forgotten += forgotten
        self._held = OrderedDict((k, n) for k, n in self._held.items() if k not in forgotten)

    def end_step(self) -> list[ImageKey]:
        """Return the images to drop before the step: those used least recently."""
        dropped = [key for key in self._forgotten if key not in self._held]
        self._forgotten.clear()
        total = sum(self._held.values())
        for key, tokens in list(self._held.items()):
            if total <= self._kept_tokens or key in self._used:
                break
            del self._held[key]
            dropped.append(key)
            total -= tokens
        return dropped
