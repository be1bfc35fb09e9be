"""How prompts' prefixes are named: the keys that engines cache blocks by and routers route by."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

ROOT_KEY = b""


def root_key(salt: str) -> bytes:
    """What the first block's key is chained to: blocks under unlike salts never match."""
    if not salt:
        return ROOT_KEY
    return hashlib.blake2b(salt.encode(), digest_size=32, person=b"octavo.salt").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full block by its tokens and all that come before it.

    A 256-bit BLAKE2b digest: two different prefixes share a key only if the
    hash is broken, so a hit is never another prompt's data.

    Args:
        parent: the key of the block before it, `root_key` for the first.
        tokens: the `block_size` token ids in the block, each below 2**32.
    """
    digest = hashlib.blake2b(parent, digest_size=32)
    digest.update(array("I", tokens).tobytes())
    return digest.digest()


def reusable_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> Iterator[bytes]:
    """Yields the keys of a prompt's full blocks that a cache may already hold.

    The prompt's last token is in none of them: its logits must be computed.
    """
    key = root_key(salt)
    for end in range(block_size, len(tokens), block_size):
        key = block_key(key, tokens[end - block_size : end])
        yield key


def short_key(key: bytes) -> int:
    """A key as engines publish it: its first 8 bytes, enough to route by."""
    return int.from_bytes(key[:8], "little")
