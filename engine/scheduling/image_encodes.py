"""Which images each step encodes, and which encoded ones are kept."""

from collections import OrderedDict
from collections.abc import Collection, Iterable

from octavo.engine.kv_cache import KVCacheManager, Span
from octavo.engine.scheduling.preemption import with_blocks
from octavo.engine.scheduling.request import PromptImage, Request
from octavo.engine.scheduling.sequence import SequenceGroup

ImageKey = tuple[str, bytes]
"""A request's salt and an image's digest: only requests of one salt share encoded images, as the
speed of an answer must not tell what others have sent."""


def image_key(request: Request, image: PromptImage) -> ImageKey:
    """Return the key of a request's image."""
    return request.cache_salt, image.span.digest


def readers(
    running: Iterable[SequenceGroup], cache: KVCacheManager, images: Collection[ImageKey]
) -> list[SequenceGroup]:
    """Return the running groups that still need one of these images."""

    def reads(group: SequenceGroup) -> bool:
        computed = min((each.num_computed for each in with_blocks(group, cache)), default=0)
        wanted = (each for each in group.request.images if computed < each.span.end)
        return any(image_key(group.request, each) in images for each in wanted)

    return list(filter(reads, running))


class ImageEncodes:
    """Chooses the images that a step encodes, and those that stay encoded: the last ones used.

    A step encodes for a bounded time, so an image may take several steps. Meanwhile the prompts
    that need it wait, and other requests go on.

    Args:
        max_tokens: Maximum tokens of images that a step encodes, but at least one image.
        kept_tokens: Tokens of encoded images that are kept.
        longest_whole: Maximum tokens of an image that a chunk must not end within; 0: it may.

    Attributes:
        chosen: The images that the step encodes, in order, as far as it comes.
        begun: The image that the last step may have begun to encode; None if it finished all.
        longest_whole: See above.
    """

    def __init__(self, max_tokens: int, kept_tokens: int, longest_whole: int = 0) -> None:
        self._max_tokens = max_tokens
        self._kept_tokens = kept_tokens
        self.longest_whole = longest_whole
        self._held: OrderedDict[ImageKey, int] = OrderedDict()
        self._used: set[ImageKey] = set()
        self._forgotten: list[ImageKey] = []
        self.begun: tuple[ImageKey, PromptImage] | None = None
        self.chosen: dict[ImageKey, PromptImage] = {}

    def begin_step(self, requests: Iterable[Request]) -> None:
        """Choose the image that the step before began; drop it if no request needs it."""
        self.chosen, self._used = {}, set()
        if self.begun is not None:
            key, image = self.begun
            if any(key == image_key(each, one) for each in requests for one in each.images):
                self.chosen[key] = image
            else:
                self._forgotten.append(key)
            self.begun = None

    def fit(self, request: Request, spans: list[Span], used: int) -> tuple[list[Span], int]:
        """Choose the images of chunks of a prompt, and shorten chunks that need them.

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
        """Return the part of a chunk that needs only encoded images.

        Text before an image waits with it, and so do encoded images while there is room for all, so
        that one step computes them.
        """
        end, ready, missing = span.end, 0, list[PromptImage]()
        for image in request.images:
            if image.span.end <= span.start or image.span.start >= end:
                continue
            if self.longest_whole and image.span.end > end:
                end = max(image.span.start, span.start)
                break
            key = image_key(request, image)
            if key in self._held:
                self._held.move_to_end(key)
                self._used.add(key)
                ready += not missing
            else:
                self._choose(key, image)
                missing.append(image)
        if missing:
            tokens = sum(len(image.places) for image in missing)
            whole = sum(self._held.values()) + tokens <= self._kept_tokens
            waits = whole or not ready
            end = span.start if waits else max(missing[0].span.start, span.start)
        return span._replace(end=end)

    def _choose(self, key: ImageKey, image: PromptImage) -> None:
        planned = sum(len(other.places) for other in self.chosen.values())
        if not self.chosen or planned + len(image.places) <= self._max_tokens:
            self.chosen.setdefault(key, image)

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

    def finish(self, done: Collection[ImageKey], failed: Collection[ImageKey]) -> None:
        """Record which of the chosen images have been encoded, and which cannot be."""
        left = dict(self.chosen)
        for key in [*done, *failed]:
            image = left.pop(key, None)
            if image is not None and key in done:
                self._held[key] = len(image.places)
            else:
                self._forgotten.append(key)  # an earlier step failed after it was encoded
        self.begun = next(iter(left.items()), None)

    def forget(self) -> None:
        """Forget all images, because a step failed."""
        self._forgotten += self._held
        self._held.clear()
        self.begun = None
