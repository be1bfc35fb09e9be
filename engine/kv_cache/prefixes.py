"""The prefix cache: finds the blocks that already hold a prompt's prefix, and publishes others.

A full block of K and V is published under the key of the prefix that ends with it.
A state is overwritten in each step. To keep it for the prefix cache, its blocks are published like
full blocks of K and V, and the next step's writer gets a copy (`KVCacheManager.extend`). As in
Marconi (Pan et al., MLSys 2025), the kept states are those at a prompt's end, at the end of a
prefix that prompts share, and a decode's latest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.common.kv_cache.layer_groups import LayerGroup, most_kept
from octavo.common.kv_cache.prefix_hash import (
    ROOT_KEY,
    PrefixSalt,
    block_key,
    chain_keys,
    image_digests,
    root_key,
)
from octavo.engine.kv_cache.block_pool import BlockPool
from octavo.engine.kv_cache.block_table import BlockTable

KEY_BYTES = 32
STORED = -1
"""Block number of a hit in a slower tier."""

BlockContents = tuple[bytes, tuple[int, ...]]
"""The key of the block before a published one, empty for the first, and the block's tokens."""
IsStored = Callable[[bytes], bool]
"""Returns whether a slower tier has a key."""


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


def _is_plain(salt: str) -> bool:
    """Return whether a prompt's tokens alone make the keys of its blocks."""
    return not salt and not isinstance(salt, PrefixSalt)


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


class PrefixCache:
    """The published blocks of the device and of swap space.

    Attributes:
        nothing: The empty prefix.
        stride: Prefixes end at multiples of this many tokens.
        keeps_states: Whether any layer group has states.
        contents: The contents of published blocks whose prefix has no salt; None: not kept.
        published: Keys of prefix blocks in either pool, as of the last `take_changes`.
        is_stored: Returns whether a slower tier has a key; None without such a tier.
    """

    def __init__(self, groups: Sequence[LayerGroup], device: BlockPool, swap: BlockPool) -> None:
        self._groups = groups
        self._device = device
        self._swap = swap
        self._block_size = min(group.block_size for group in groups)
        self.stride = max(group.block_size for group in groups)
        self._unbounded = [
            (i, group.block_size // self._block_size)
            for i, group in enumerate(groups)
            if not group.bounded and not group.state_blocks
        ]
        # Blocks of a longer prefix would have to be spilled before they could be used.
        self._most_tokens = most_kept(groups)
        self.nothing = Prefix(0, [], [[] for _ in groups])
        self.keeps_states = any(group.state_blocks for group in groups)
        self.contents: dict[bytes, BlockContents] | None = None
        self.published: set[bytes] = set()
        self.is_stored: IsStored | None = None
        self._unsaved: list[tuple[int, bytes]] = []

    def find(
        self, token_ids: Sequence[int], salt: str, is_stored: IsStored = lambda _: False
    ) -> Prefix:
        """Return the longest prefix for which every group has the blocks that later tokens need.

        It never includes the last token, whose logits must be computed.

        Args:
            token_ids: The tokens.
            salt: The salt of their keys.
            is_stored: Whether a slower tier has a key; such hits have the block `STORED`.
        """
        size = self._block_size
        keys: list[bytes] = []
        known: dict[int, list[Hit]] = {group: [] for group, _ in self._unbounded}
        key = root_key(salt)
        for end in range(size, min(len(token_ids), self._most_tokens + 1), size):
            images = image_digests(salt, end - size, end)
            key = block_key(key, token_ids[end - size : end], images)
            if not self._extend(known, key, end // size, is_stored):
                break
            keys.append(key)
        reach = len(keys) * size // self.stride * self.stride
        for end in range(reach, 0, -self.stride):
            if (groups := self._groups_at(end, keys, known, is_stored)) is not None:
                return Prefix(end, keys[: end // size], groups, reach)
        return Prefix(0, [], self.nothing.groups, reach)

    def _extend(
        self, known: dict[int, list[Hit]], key: bytes, count: int, is_stored: IsStored
    ) -> bool:
        """Look up the block of each unbounded group that ends with the prefix's block `count`."""
        for group, ratio in self._unbounded:
            if count % ratio == 0:
                hits = self._look_up(block_keys(key, group), is_stored)
                if hits is None:
                    return False
                known[group] += hits
        return True

    def _groups_at(
        self, end: int, keys: list[bytes], known: dict[int, list[Hit]], is_stored: IsStored
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
            hits = self._look_up(names, is_stored)
            if hits is None:
                return None
            groups.append(hits)
        return groups

    def _look_up(self, keys: list[bytes], is_stored: IsStored) -> list[Hit] | None:
        """Return the blocks of keys, on the device or in swap space; None if a key has none."""
        hits = []
        for key in reversed(keys):  # missing blocks are most likely at the end
            if (block := self._device.find(key)) is not None:
                hits.append(Hit(key, block, swapped=False))
            elif (block := self._swap.find(key)) is not None:
                hits.append(Hit(key, block, swapped=True))
            elif is_stored(key):
                hits.append(Hit(key, STORED, swapped=False))
            else:
                return None
        hits.reverse()
        return hits

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish a sequence's full blocks of K and V that are not published yet.

        Its state is published too, if it covers `num_computed` tokens and these fill all blocks.

        Args:
            table: The sequence's block table, on the device.
            token_ids: The sequence's tokens.
            num_computed: Number of leading tokens that have K/V.
        """
        keys, size = table.keys, self._block_size
        before, count = len(keys), num_computed // size
        if count <= before:
            return
        parent = keys[-1] if keys else root_key(table.salt)
        new = token_ids[before * size : count * size]
        keys += chain_keys(parent, new, size, table.salt, before * size)
        for block, key in self._full_blocks(table, before, count):
            self.publish_block(self._device, block, key)
            if self.is_stored is not None:
                self._unsaved.append((block, key))
        if _is_plain(table.salt):
            self._keep_contents(keys, token_ids, before, count)
        if self.keeps_states and num_computed == table.computed:
            self._publish_state(table, len(token_ids))

    def keep_contents(self, token_ids: Sequence[int], salt: str) -> None:
        """Keep the contents of a prompt's blocks that the slower tier has filled."""
        if self.contents is not None and _is_plain(salt):
            keys = chain_keys(ROOT_KEY, token_ids, self._block_size)
            self._keep_contents(keys, token_ids, 0, len(keys))

    def _keep_contents(
        self, keys: Sequence[bytes], token_ids: Sequence[int], begin: int, end: int
    ) -> None:
        """Keep the contents of the first group's blocks, from key `begin` to key `end`.

        Without the blocks before them, those of a window tell nothing.
        """
        layers = self._groups[0]
        if self.contents is None or layers.state_blocks or layers.bounded:
            return
        size, ratio = layers.block_size, layers.block_size // self._block_size
        for i in range(begin // ratio, end // ratio):
            key = keys[(i + 1) * ratio - 1]
            if self._device.find(key) is not None or self._swap.find(key) is not None:
                parent = keys[i * ratio - 1] if i else ROOT_KEY
                tokens = tuple(token_ids[i * size : (i + 1) * size])
                self.contents[key] = parent, tokens

    def _publish_state(self, table: BlockTable, num_tokens: int) -> None:
        """Publish the state if it covers full blocks; a decode's replaces its previous one."""
        if table.computed % self.stride:
            return
        key = table.keys[table.computed // self._block_size - 1]
        decoding = table.computed >= num_tokens
        if decoding:
            for old in table.snapshot:
                if not self._device.was_hit(old):
                    self._device.forget(old)
            table.snapshot = []
        for group, layers in enumerate(self._groups):
            if layers.state_blocks:
                names = block_keys(key, group, layers.state_blocks)
                for block, name in zip(table.groups[group], names, strict=True):
                    self.publish_block(self._device, block, name)
                    if self.is_stored is not None and not decoding:
                        self._unsaved.append((block, name))
                table.snapshot += names if decoding else []

    def pause_before(self, table: BlockTable, start: int, end: int) -> int:
        """Return the end for a prefill of tokens [start, end), so that a state can be kept.

        States are useful where prompts can find them: after the last full block before the prompt's
        end, and at the end of a prefix shared with another prompt.
        """
        if not self.keeps_states:
            return end
        if start < table.branch < end:
            return table.branch
        whole = (end - 1) // self.stride * self.stride
        return whole if whole > start else end

    def publish_block(self, pool: BlockPool, block: int, key: bytes) -> None:
        """Publish a block; a key that was hit in one pool is marked hit in the other."""
        pool.publish(block, key)
        if self._device.was_hit(key) or self._swap.was_hit(key):
            pool.mark_hit(key)

    def full_blocks(self, table: BlockTable) -> Iterator[tuple[int, bytes]]:
        """Yield the full blocks of K and V that a table holds, with their keys."""
        return self._full_blocks(table, 0, len(table.keys))

    def _full_blocks(self, table: BlockTable, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the full blocks from key `begin` to key `end` of the table."""
        for group, layers in enumerate(self._groups):
            if layers.state_blocks:
                continue
            ratio, blocks = layers.block_size // self._block_size, table.groups[group]
            first = max(begin // ratio, table.passed[group])
            for i in range(first, min(end // ratio, len(blocks))):
                yield blocks[i], block_keys(table.keys[(i + 1) * ratio - 1], group)[0]

    def missing(
        self, token_ids: Sequence[int], salt: str, is_stored: IsStored
    ) -> tuple[list[bytes], int]:
        """Return the keys to read from a slower tier for the longest prefix.

        Returns:
            The keys, and the number of the prefix's tokens that memory lacks.
        """
        prefix = self.find(token_ids, salt, is_stored)
        keys = [hit.key for hit in prefix.hits() if hit.block == STORED]
        return keys, prefix.num_tokens - self.find(token_ids, salt).num_tokens if keys else 0

    def take_unsaved(self) -> list[tuple[int, bytes]]:
        """Return the device blocks published since the last call, with their keys, to be stored.

        A decode's states are not among them: each replaces the one before.
        """
        blocks, self._unsaved = self._unsaved, []
        return blocks

    def contents_of(self, keys: Iterable[bytes]) -> dict[bytes, BlockContents]:
        """Return the contents of published blocks, of those that are kept."""
        kept = self.contents or {}
        return {key: kept[key] for key in keys if key in kept}

    def take_changes(self) -> tuple[set[bytes], set[bytes]]:
        """Update `published`.

        Returns:
            The keys added, and the keys removed, since the last call.
        """
        changed = self._device.take_changed() | self._swap.take_changed()
        changed = set(filter(is_shared_key, changed))
        held = self._device.held_of(changed) | self._swap.held_of(changed)
        added, removed = held - self.published, (changed - held) & self.published
        self.published ^= added | removed
        if self.contents is not None:
            for key in changed - held:
                self.contents.pop(key, None)
        return added, removed
