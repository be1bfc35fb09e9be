"""Keys of prompt prefixes, by which engines cache blocks and routers choose engines."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from octavo.common.limits import MAX_CACHE_SALT

ROOT_KEY = b""
SEPARATOR = "\0" * (MAX_CACHE_SALT + 1)


def root_key(salt: str) -> bytes:
    """Return the first block's parent key; blocks with different salts never match."""
    if not salt:
        return ROOT_KEY
    return hashlib.blake2b(salt.encode(), digest_size=32, person=b"octavo.salt").digest()


def prefix_salt(salt: str, adapter: str) -> str:
    """Return the salt of an adapter's requests.

    It is longer than a request's salt may be, so it equals no other.

    Args:
        salt: The request's salt.
        adapter: Digest of the adapter, of fixed length; empty without adapter.
    """
    return f"{adapter}{SEPARATOR}{salt}" if adapter else salt


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full block: a 256-bit BLAKE2b digest of its tokens and its parent's key.

    The first block's parent is `root_key`. Token ids are below 2**32.
    """
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=32).digest()


def chain_keys(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return the keys of the full blocks of `tokens`, which follow a block with key `parent`."""
    data, keys = array("I", tokens), list[bytes]()
    packed, width = data.tobytes(), data.itemsize * block_size
    for end in range(width, len(packed) + 1, width):
        parent = hashlib.blake2b(parent + packed[end - width : end], digest_size=32).digest()
        keys.append(parent)
    return keys


def reusable_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> Iterator[bytes]:
    """Yield the keys of a prompt's full blocks that a cache may already hold.

    They exclude the prompt's last token, whose logits must be computed.
    """
    key = root_key(salt)
    for end in range(block_size, len(tokens), block_size):
        key = block_key(key, tokens[end - block_size : end])
        yield key


def short_key(key: bytes) -> int:
    """Return the first 8 bytes of a key as an integer, as engines publish it for routing."""
    return int.from_bytes(key[:8], "little")
