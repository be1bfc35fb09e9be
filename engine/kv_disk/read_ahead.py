"""Reads prefixes from slower tiers and other engines before requests wait for admission.

It writes them to disk, and copies them for other engines, beside the steps.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from octavo.engine.kv_cache.prefixes import IsStored
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.kv_disk.reads import Bytes, Read, Reads, Source, StoredBlock
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState, SequenceGroup

Call = Callable[..., None]
ASSUMED_TOKEN_SECONDS = 1e-3
"""Time to compute a token of a prefill, until it is measured. A decode engine may compute none:
then it assumes what a prefill engine takes, if this is longer."""
TYPICAL_TOKENS = 1024
"""Length of the prefix whose reading time is reported."""

_Choice = tuple[Reads, Source, IsStored]


class Peers(Protocol):
    """Other engines of the same block layout."""

    reads: Reads

    def source(self, address: str) -> Source:
        """Return the engine at an address as a source of blocks."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """A prompt whose blocks another engine is computing.

    Attributes:
        token_ids: The prompt.
        salt: The salt of its blocks' keys.
        kv_source: The engine's address.
        then: Called when it has ended, in the core's thread.
    """

    token_ids: tuple[int, ...]
    salt: str
    kv_source: str
    then: Callable[[], object] = lambda: None


class ReadAhead:
    """Moves prefix blocks between the disk or other engines and swap space.

    Attributes:
        reads: Unfinished reads, each with the group that waits for it.
        tier: Reads and writes files; None without `--kv-disk`.
        peers: Reads blocks of other engines; None if they cannot be shared.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tensors: CacheTensors,
        call: Call,
        *,
        tier: DiskTier | None,
        peers: Peers | None,
    ) -> None:
        """Keep the scheduler's prefix blocks on disk too.

        Args:
            scheduler: Gets a group once its prefix is read.
            tensors: The tensors of its cache.
            call: Has the core's thread call a function with arguments; from any thread.
            tier: Reads and writes files, if any.
            peers: Reads blocks of other engines, if they can be shared.
        """
        self._scheduler = scheduler
        self._tensors = tensors
        self.tier = tier
        self.peers = peers
        self._call = call
        self._sent = 0
        self._assumed_token_seconds = ASSUMED_TOKEN_SECONDS
        self._waiting: dict[Read, list[tuple[SequenceGroup, Iterator[_Choice]]]] = {}
        self._prefetches: dict[Read, Prefetch] = {}
        self.reads: dict[SequenceGroup, Read] = {}
        self._cache = scheduler.cache
        if tier is not None:
            self._cache.prefixes.is_stored = lambda key: key in tier.held

    @property
    def counters(self) -> dict[str, int]:
        """Numbers since the start: the disk's, and of blocks and reads of other engines."""
        counters = dict(self.tier.counters) if self.tier is not None else {}
        counters["peer_sent"] = self._sent
        for name, value in self.peers.reads.counters.items() if self.peers is not None else ():
            counters[f"peer_{name}"] = value
        return counters

    @property
    def read_share(self) -> float:
        """Time to read a prefix from disk, as a share of the time to compute it; 1 at most."""
        if self.tier is None:
            return 0.0
        seconds = self._prefill_seconds(TYPICAL_TOKENS)
        return self.tier.rate.share(self._cache.blocks_for(TYPICAL_TOKENS), seconds)

    def _prefill_seconds(self, tokens: int) -> float:
        measured = self._scheduler.policy.prefill_seconds(tokens)
        return tokens * self._assumed_token_seconds if measured is None else measured

    def submit(self, group: SequenceGroup) -> None:
        """Queue a group for admission, at once or when its prefix has been read."""
        computed = group.request.sampling.prompt_logprobs is not None  # all of the prompt
        if computed or not self._join(group):
            self._read_next(group, iter(()) if computed else self._choices(group))

    def _choices(self, group: SequenceGroup) -> Iterator[_Choice]:
        """Yield what a group's prefix can be read from."""
        if self.peers is not None and (address := group.request.kv_source):
            yield self.peers.reads, self.peers.source(address), lambda _: True
        if self.tier is not None and (is_stored := self._cache.prefixes.is_stored) is not None:
            yield self.tier.reads, self.tier, is_stored

    def _read_next(self, group: SequenceGroup, choices: Iterator[_Choice]) -> None:
        """Read a group's missing blocks from the next source that has any, or queue the group."""
        token_ids, salt = group.live[0].token_ids, group.request.prefix_salt
        for reads, source, is_stored in choices:
            keys, tokens = self._cache.prefixes.missing(token_ids, salt, is_stored)
            seconds, room = self._prefill_seconds(tokens), self._cache.moves.num_places
            if 0 < len(keys) <= room and reads.worthwhile(source, len(keys), seconds):
                self._wait(group, self._start(reads, source, keys, seconds), choices)
                return
        group.state = GroupState.WAITING
        self._scheduler.submit(group)

    def _join(self, group: SequenceGroup) -> bool:
        """Let a group wait for a prefetch that copies its next block, if there is one."""
        source = group.request.kv_source
        reads = [read for read, each in self._prefetches.items() if each.kv_source == source]
        if not reads or self.peers is None:
            return False
        token_ids, salt = group.live[0].token_ids, group.request.prefix_salt
        keys, tokens = self._cache.prefixes.missing(token_ids, salt, lambda _: True)
        read = next((read for read in reads if keys[:1] and keys[0] in read.keys), None)
        if read is None:
            return False
        seconds = read.seconds_per_block / self._cache.block_size
        self._assumed_token_seconds = max(self._assumed_token_seconds, seconds)
        self.peers.reads.hurry(read, self._prefill_seconds(tokens))
        self._wait(group, read, self._choices(group))
        return True

    def _wait(self, group: SequenceGroup, read: Read, choices: Iterator[_Choice]) -> None:
        group.state = GroupState.READING
        self.reads[group] = read
        self._waiting[read].append((group, choices))

    def _start(self, reads: Reads, source: Source, keys: list[bytes], seconds: float) -> Read:
        read = reads.start(source, keys, seconds, partial(self._call, self._take))
        self._waiting[read] = []
        return read

    def _take(self, read: Read, blocks: list[StoredBlock], ended: bool) -> None:
        """Put blocks into swap space; at a read's end go on with the groups that wait for it."""
        # Blocks are evicted in the order of placing, and a prefix must lose its end first.
        for key, contents in reversed(blocks):
            if (block := self._cache.moves.place(key)) is not None:
                self._tensors.swapper.fill(block, contents)
        read.placed()
        if not ended:
            return
        for key in reversed(read.keys):
            if self._cache.swap.find(key) is not None:
                self._cache.moves.place(key)  # it becomes the last to be evicted
        if (prefetch := self._prefetches.pop(read, None)) is not None:
            self._cache.prefixes.keep_contents(prefetch.token_ids, prefetch.salt)
            prefetch.then()
        for group, choices in self._waiting.pop(read, ()):
            if self.reads.pop(group, None) is not None:  # it has not ended meanwhile
                prompt, salt = group.live[0].token_ids, group.request.prefix_salt
                self._cache.prefixes.keep_contents(prompt, salt)
                self._read_next(group, choices)

    def cancel(self, group: SequenceGroup) -> None:
        """Forget a group that has ended."""
        if (read := self.reads.pop(group, None)) is None:
            return
        self._waiting[read] = [each for each in self._waiting[read] if each[0] is not group]
        self._end_unwanted(read)

    def _end_unwanted(self, read: Read) -> None:
        if read not in self._prefetches and not self._waiting[read]:
            del self._waiting[read]
            read.end(cancelled=True)

    def prefetch(self, prefetch: Prefetch) -> None:
        """Begin to copy a prompt's blocks as another engine computes them."""
        assert self.peers is not None, "the caller refuses it"
        tokens, peer = [*prefetch.token_ids, 0], self.peers.source(prefetch.kv_source)
        keys, count = self._cache.prefixes.missing(tokens, prefetch.salt, lambda _: True)
        worthwhile = self.peers.reads.worthwhile(peer, len(keys), self._prefill_seconds(count))
        if worthwhile and 0 < len(keys) <= self._cache.moves.num_places:
            self._prefetches[self._start(self.peers.reads, peer, keys, math.inf)] = prefetch
        else:
            prefetch.then()

    def cancel_prefetch(self, prefetch: Prefetch) -> None:
        """Copy no more blocks, unless a group waits for them."""
        read = next((read for read, each in self._prefetches.items() if each is prefetch), None)
        if read is not None:
            del self._prefetches[read]
            self._end_unwanted(read)

    def save(self) -> None:
        """Copy newly published blocks for the writer, before a step may overwrite them."""
        if self.tier is not None:
            for block, key in self._cache.prefixes.take_unsaved():
                self.tier.save(key, partial(self._tensors.swapper.copy_out, block))

    def copy(self, keys: Sequence[bytes]) -> list[Callable[[], Bytes]]:
        """Copy the leading blocks that memory has, for another engine.

        Returns:
            For each, a function that waits for the copy, for any thread.
        """
        copies = []
        for key in keys:
            if (block := self._cache.device.find(key)) is not None:
                copies.append(self._tensors.swapper.copy_out(block))
            elif (block := self._cache.swap.find(key)) is not None:
                copies.append(self._tensors.swapper.copy_kept(block))
            else:
                break
        self._sent += len(copies)
        return copies

    def close(self) -> None:
        """Stop reading and writing."""
        if self.tier is not None:
            self.tier.close()
        if self.peers is not None:
            self.peers.reads.close()
