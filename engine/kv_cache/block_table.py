"""A sequence's block table and the chained keys of its full blocks."""

import hashlib
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

ROOT_KEY = b""


def root_key(salt: str) -> bytes:
    """What the first block's key is chained to: blocks under unlike salts never match."""
    if not salt:
        return ROOT_KEY
    return hashlib.blake2b(salt.encode(), digest_size=32, person=b"octavo.salt").digest()


def block_key(parent: bytes, tokens: Tokens[int]) -> bytes:
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


@dataclass(slots=True, eq=False)
class BlockTable:
    """Where a sequence's K/V lies.

    Attributes:
        blocks: physical block of each logical block; of the device's pool, or
            of the swap pool while `swapped`.
        num_tokens: how many tokens, from the front, the blocks are for.
        root: what its keys begin from.
        keys: keys of the leading full blocks that were named so far.
        swapped: whether the blocks are in CPU swap space.
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    root: bytes = ROOT_KEY
    keys: list[bytes] = field(default_factory=list)
    swapped: bool = False
