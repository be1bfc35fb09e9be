"""Finds the blocks that already hold a prompt's prefix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.common.kv_cache.prefix_hash import block_key, root_key
from octavo.engine.kv_cache.block_pool import BlockPool

KEY_BYTES = 32
STORED = -1
"""Block number of a hit in a slower tier."""


class Hit(NamedTuple):
    """A cached block of a full prefix or of a state; in swap space if `swapped`."""

    key: bytes
    block: int
    swapped: bool


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a prompt.

    Attributes:
        num_tokens: Tokens that need not be computed.
        keys: Keys of these tokens, in blocks of the smallest size.
        groups: The blocks of each layer group, from the first that later tokens attend to.
        reach: Number of leading tokens whose K and V are all cached, even without a state.
    """

    num_tokens: int
    keys: list[bytes]
    groups: list[list[Hit]]
    reach: int = 0

    def hits(self) -> Iterator[Hit]:
        """Yield all blocks."""
        for group in self.groups:
            yield from group


def block_keys(key: bytes, group: int, count: int = 1) -> list[bytes]:
    """Return the keys of a layer group's blocks for a prefix.

    The first group's blocks of K and V have the prefix's own key, which routers know.

    Args:
        key: The key of the prefix that ends with the block, or that the state covers.
        group: The layer group.
        count: The number of blocks.
    """
    if not group:
        return [key] if count == 1 else [key + i.to_bytes(4) for i in range(count)]
    return [key + bytes([group]) + i.to_bytes(4) for i in range(count)]


def is_shared_key(key: bytes) -> bool:
    """Return whether routers know the key: it belongs to the first group's K and V."""
    return len(key) == KEY_BYTES


class PrefixFinder:
    """Looks prompts up in the device's blocks and in swap space.

    Attributes:
        nothing: The empty prefix.
        stride: Prefixes end at multiples of this many tokens.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        device: BlockPool,
        swap: BlockPool,
        is_stored: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        """Look prefixes up in these pools.

        Args:
            groups: The model's layer groups.
            device: The device's blocks.
            swap: The blocks of swap space.
            is_stored: Whether a slower tier has a key; such hits have the block `STORED`.
        """
        self._groups = groups
        self._device = device
        self._swap = swap
        self._is_stored = is_stored
        self._block_size = min(group.block_size for group in groups)
        self.stride = max(group.block_size for group in groups)
        self._unbounded = [
            (i, group.block_size // self._block_size)
            for i, group in enumerate(groups)
            if not group.bounded and not group.state_blocks
        ]
        self.nothing = Prefix(0, [], [[] for _ in groups])

    def find(self, token_ids: Sequence[int], salt: str) -> Prefix:
        """Return the longest prefix for which every group has the blocks that later tokens need.

        It never includes the last token, whose logits must be computed.
        """
        size = self._block_size
        keys: list[bytes] = []
        known: dict[int, list[Hit]] = {group: [] for group, _ in self._unbounded}
        key = root_key(salt)
        for end in range(size, len(token_ids), size):
            key = block_key(key, token_ids[end - size : end])
            if not self._extend(known, key, end // size):
                break
            keys.append(key)
        reach = len(keys) * size // self.stride * self.stride
        for end in range(reach, 0, -self.stride):
            if (groups := self._groups_at(end, keys, known)) is not None:
                return Prefix(end, keys[: end // size], groups, reach)
        return Prefix(0, [], self.nothing.groups, reach)

    def _extend(self, known: dict[int, list[Hit]], key: bytes, count: int) -> bool:
        """Look up the block of each unbounded group that ends with the prefix's block `count`."""
        for group, ratio in self._unbounded:
            if count % ratio == 0:
                hits = self._look_up(block_keys(key, group))
                if hits is None:
                    return False
                known[group] += hits
        return True

    def _groups_at(
        self, end: int, keys: list[bytes], known: dict[int, list[Hit]]
    ) -> list[list[Hit]] | None:
        """Return each group's blocks of a prefix of `end` tokens; None if a group lacks some."""
        groups = []
        for group, layers in enumerate(self._groups):
            if group in known:
                groups.append(known[group][: end // layers.block_size])
                continue
            if layers.state_blocks:
                names = block_keys(keys[end // self._block_size - 1], group, layers.state_blocks)
            else:
                ratio = layers.block_size // self._block_size
                needed = range(layers.first_block(end), end // layers.block_size)
                names = [block_keys(keys[(i + 1) * ratio - 1], group)[0] for i in needed]
            hits = self._look_up(names)
            if hits is None:
                return None
            groups.append(hits)
        return groups

    def _look_up(self, keys: list[bytes]) -> list[Hit] | None:
        """Return the blocks of keys, on the device or in swap space; None if a key has none."""
        hits = []
        for key in reversed(keys):  # missing blocks are most likely at the end
            if (block := self._device.find(key)) is not None:
                hits.append(Hit(key, block, swapped=False))
            elif (block := self._swap.find(key)) is not None:
                hits.append(Hit(key, block, swapped=True))
            elif self._is_stored(key):
                hits.append(Hit(key, STORED, swapped=False))
            else:
                return None
        hits.reverse()
        return hits
