"""Finds the tokens of a prompt that stand for its images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.common import rpc
from octavo.common.kv_cache.prefix_hash import ImageSpan

if TYPE_CHECKING:  # slow to import
    from octavo.router.images.processor import ProcessedImage


def placed_images(
    images: "Sequence[ProcessedImage]", token_ids: Sequence[int], image_token_id: int
) -> "list[tuple[ImageSpan, ProcessedImage]]":
    """Return a prompt's images with their tokens.

    Args:
        images: The images, in order.
        token_ids: The prompt's tokens.
        image_token_id: The token whose embeddings images replace.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if the prompt has more or fewer such tokens than the images,
            or ends with one.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == image_token_id]
    if len(places) != sum(image.num_tokens for image in images):
        raise rpc.invalid(
            "chat.messages", "chat.messages must not spell the token that stands for images"
        )
    if places[-1:] == [len(token_ids) - 1]:
        raise rpc.invalid("chat.messages", "chat.messages must not end with an image")
    placed, first = [], 0
    for image in images:
        end = first + image.num_tokens
        span = ImageSpan(places[first], places[end - 1] + 1, image.digest)
        placed.append((span, image))
        first = end
    return placed
