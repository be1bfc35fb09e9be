"""Reads prefixes from disk before requests wait for admission; writes them beside the steps."""

from collections.abc import Callable
from functools import partial

from octavo.engine.kv_disk.disk_tier import DiskTier, Read, StoredBlock
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import GroupState, SequenceGroup

Call = Callable[..., None]
ASSUMED_TOKEN_SECONDS = 1e-3
"""Time to compute a token of a prefill, until it is measured."""
TYPICAL_TOKENS = 1024
"""Length of the prefix whose reading time is reported."""


class ReadAhead:
    """Moves prefix blocks between the disk and swap space.

    Attributes:
        reads: Unfinished reads, each with the group that waits for it.
        tier: Reads and writes files.
    """

    def __init__(
        self, scheduler: Scheduler, tensors: CacheTensors, tier: DiskTier, call: Call
    ) -> None:
        """Keep the scheduler's prefix blocks on disk too.

        Args:
            scheduler: Gets a group once its prefix is read.
            tensors: The tensors of its cache.
            tier: Reads and writes files.
            call: Has the core's thread call a function with arguments; from any thread.
        """
        self._scheduler = scheduler
        self._tensors = tensors
        self.tier = tier
        self._call = call
        self.reads: dict[SequenceGroup, Read] = {}
        self._cache = scheduler.cache
        self._cache.prefixes.is_stored = lambda key: key in tier.held

    @property
    def read_share(self) -> float:
        """Time to read a prefix, as a share of the time to compute it; 1 at most."""
        seconds = self._prefill_seconds(TYPICAL_TOKENS)
        return self.tier.read_share(self._cache.blocks_for(TYPICAL_TOKENS), seconds)

    def _prefill_seconds(self, tokens: int) -> float:
        measured = self._scheduler.policy.prefill_seconds(tokens)
        return tokens * ASSUMED_TOKEN_SECONDS if measured is None else measured

    def submit(self, group: SequenceGroup) -> None:
        """Queue a group for admission, at once or when its prefix has been read."""
        request, lead = group.request, group.live[0]
        computed = request.sampling.prompt_logprobs is not None  # all of the prompt
        salt = request.prefix_salt
        prefixes, room = self._cache.prefixes, self._cache.moves.num_places
        keys, tokens = ([], 0) if computed else prefixes.missing(lead.token_ids, salt)
        seconds = self._prefill_seconds(tokens)
        if not 0 < len(keys) <= room or not self.tier.worthwhile(len(keys), seconds):
            self._scheduler.submit(group)
            return
        group.state = GroupState.READING
        finish = partial(self._call, self._finish, group)
        self.reads[group] = self.tier.read(keys, seconds, finish)

    def _finish(self, group: SequenceGroup, blocks: list[StoredBlock]) -> None:
        """Put a group's blocks into swap space and queue it, unless it has ended meanwhile."""
        if self.reads.pop(group, None) is None:
            return
        # Blocks are evicted in the order of placing, and a prefix must lose its end first.
        for key, contents in reversed(blocks):
            if (block := self._cache.moves.place(key)) is not None:
                self._tensors.swapper.fill(block, contents)
        prompt, salt = group.live[0].token_ids, group.request.prefix_salt
        self._cache.prefixes.keep_contents(prompt, salt)
        group.state = GroupState.WAITING
        self._scheduler.submit(group)

    def cancel(self, group: SequenceGroup) -> None:
        """Forget a group that has ended."""
        if (read := self.reads.pop(group, None)) is not None:
            read.end(cancelled=True)

    def save(self) -> None:
        """Copy newly published blocks for the writer, before a step may overwrite them."""
        for block, key in self._cache.prefixes.take_unsaved():
            self.tier.save(key, partial(self._tensors.swapper.copy_out, block))

    def close(self) -> None:
        """Stop reading and writing."""
        self.tier.close()
