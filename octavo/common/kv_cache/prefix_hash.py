"""Keys of prompt prefixes, by which engines cache blocks and routers choose engines."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.common.limits import MAX_CACHE_SALT

ROOT_KEY = b""
SEPARATOR = "\0" * (MAX_CACHE_SALT + 1)


class ImageSpan(NamedTuple):
    """The tokens [start, end) of a prompt that stand for an image, and the image's digest."""

    start: int
    end: int
    digest: bytes


class PrefixSalt(str):
    """A salt, with the images of the prompt: keys of their tokens' blocks cover their digests."""

    __slots__ = ("images",)

    images: Sequence[ImageSpan]

    @classmethod
    def of(cls, salt: str, images: Sequence[ImageSpan]) -> str:
        """Return the salt of a prompt; without images it is `salt` itself."""
        if not images:
            return salt
        made = cls(salt)
        made.images = images
        return made


def image_digests(salt: str, start: int, end: int) -> bytes:
    """Return the digests of the images among the tokens [start, end) of a prompt."""
    if not isinstance(salt, PrefixSalt):
        return b""
    return b"".join(
        image.digest for image in salt.images if image.start < end and start < image.end
    )


def root_key(salt: str) -> bytes:
    """Return the first block's parent key; blocks with different salts never match."""
    if not salt:
        return ROOT_KEY
    return hashlib.blake2b(salt.encode(), digest_size=32, person=b"octavo.salt").digest()


def prefix_salt(salt: str, adapter: str, images: Sequence[ImageSpan] = ()) -> str:
    """Return the salt of an adapter's requests.

    It is longer than a request's salt may be, so it equals no other.

    Args:
        salt: The request's salt.
        adapter: Digest of the adapter, of fixed length; empty without adapter.
        images: The prompt's images.
    """
    return PrefixSalt.of(f"{adapter}{SEPARATOR}{salt}" if adapter else salt, images)


def block_key(parent: bytes, tokens: Sequence[int], images: bytes = b"") -> bytes:
    """Return the key of a full block: a 256-bit BLAKE2b digest of its tokens and its parent's key.

    The first block's parent is `root_key`. Token ids are below 2**32.

    Args:
        parent: The key of the block before.
        tokens: The block's tokens.
        images: Digests of the images among them, from `image_digests`.
    """
    return hashlib.blake2b(parent + array("I", tokens).tobytes() + images, digest_size=32).digest()


def chain_keys(
    parent: bytes, tokens: Sequence[int], block_size: int, salt: str = "", first: int = 0
) -> list[bytes]:
    """Return the keys of the full blocks of some tokens.

    Args:
        parent: The key of the block before them.
        tokens: The tokens.
        block_size: Tokens per block.
        salt: The prompt's salt, for its images; it changes nothing else.
        first: Position of the first token in its sequence.
    """
    data, keys = array("I", tokens), list[bytes]()
    packed, width = data.tobytes(), data.itemsize * block_size
    for number, end in enumerate(range(width, len(packed) + 1, width)):
        start = first + number * block_size
        images = image_digests(salt, start, start + block_size)
        block = parent + packed[end - width : end] + images
        parent = hashlib.blake2b(block, digest_size=32).digest()
        keys.append(parent)
    return keys


def reusable_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> Iterator[bytes]:
    """Yield the keys of a prompt's full blocks that a cache may already hold.

    They exclude the prompt's last token, whose logits must be computed.
    """
    key = root_key(salt)
    for end in range(block_size, len(tokens), block_size):
        images = image_digests(salt, end - block_size, end)
        key = block_key(key, tokens[end - block_size : end], images)
        yield key


def short_key(key: bytes) -> int:
    """Return the first 8 bytes of a key as an integer, as engines publish it for routing."""
    return int.from_bytes(key[:8], "little")
