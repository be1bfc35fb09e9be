"""Events that the core publishes to the sessions after each step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from octavo.engine.kv_cache import BlockContents, PrefixCache
from octavo.engine.kv_cache.prefixes import is_shared_key
from octavo.engine.kv_disk.disk_tier import DiskTier
from octavo.engine.kv_disk.read_ahead import ReadAhead
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.v1.engine_pb2 import Failure, Load, Started


class FailureCode(IntEnum):
    """The kind of error of a failed request; values are google.rpc.Code's."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(slots=True, eq=False)  # creating a frozen one takes three times as long
class OutputEvent:
    """New tokens of one output; the last ones if `finish_reason` is set.

    A beam search publishes whole outputs at its end, best first, with scores. Drafted and accepted
    tokens are counted since the previous event. `number` is the output's number in its session, 0
    if it has none.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprob: TokenLogprob | None
    prompt_logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    score: float | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    number: int = 0


@dataclass(slots=True)
class StepOutput:
    """The events of one session since the last publication: nearly always those of one step.

    Attributes:
        started: Requests that were admitted for the first time.
        numbers: Numbers of the outputs that got a token and have nothing else to report: an event
            for each would take longer than the rest of the step.
        token_ids: The tokens of these, which precede those in `outputs`.
        outputs: Tokens of the other outputs.
        failures: Requests that ended without finishing.
    """

    started: list[Started] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    outputs: list[OutputEvent] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """A change of the prefix cache.

    Attributes:
        session: The new session that gets the whole contents as `stored`; None for a change for all
            sessions.
        stored: Keys of new blocks in the cache.
        evicted: Keys of blocks removed from the cache.
        disk_stored: Keys of blocks new on disk.
        disk_removed: Keys of blocks removed from disk.
        contents: Contents of stored blocks, where they are kept.
    """

    session: int | None
    stored: Collection[bytes]
    evicted: Collection[bytes]
    contents: Mapping[bytes, BlockContents] = field(default_factory=dict)
    disk_stored: Collection[bytes] = ()
    disk_removed: Collection[bytes] = ()


Publish = Callable[[Mapping[int, StepOutput], Sequence[PrefixChange], Load], None]
"""Takes the new events of each session, the changes of the prefix cache, and the load."""


class PrefixReport:
    """Reports the prefix cache to the sessions: all keys to a new one, then changes to all.

    Args:
        prefixes: The prefix cache.
        disk: Its tier on disk.
    """

    def __init__(self, prefixes: PrefixCache, disk: DiskTier | None) -> None:
        self._prefixes, self._disk = prefixes, disk
        self._parts: list[PrefixCache | DiskTier] = [prefixes] if disk is None else [prefixes, disk]
        self._snapshots: list[PrefixChange] = []

    def open_session(self, session: int) -> None:
        """Report all keys to a new session."""
        keys = [(set(part.published), set[bytes]()) for part in self._parts]
        self._snapshots.append(self._change(session, keys))

    def take(self) -> list[PrefixChange]:
        """Return the snapshots for new sessions and the changes since the last call, if any."""
        changes, self._snapshots = self._snapshots, []
        keys = [part.take_changes() for part in self._parts]
        return [*changes, self._change(None, keys)] if any(map(any, keys)) else changes

    def _change(
        self, session: int | None, keys: Sequence[tuple[set[bytes], set[bytes]]]
    ) -> PrefixChange:
        stored, evicted = keys[0]
        change = PrefixChange(session, stored, evicted, self._prefixes.contents_of(stored))
        if self._disk is None:
            return change
        disk_stored, disk_removed = (set(filter(is_shared_key, each)) for each in keys[1])
        return replace(change, disk_stored=disk_stored, disk_removed=disk_removed)


def measure_load(
    scheduler: Scheduler,
    waiting: int,
    step_seconds: float,
    read_ahead: ReadAhead | None,
    *,
    draining: bool,
) -> Load:
    """Return the current load, as routers get it.

    Args:
        scheduler: The scheduler.
        waiting: Number of requests not yet started.
        step_seconds: Duration of the last step.
        read_ahead: Reads prefixes from disk or other engines; None if there are none.
        draining: Whether new requests are refused.
    """
    cache = scheduler.cache
    return Load(
        running=len(scheduler.running),
        waiting=waiting,
        swapped=len(scheduler.swapped),
        total_blocks=cache.device.num_blocks,
        free_blocks=cache.device.num_free,
        cached_blocks=cache.device.num_cached,
        shared_blocks=cache.device.num_shared,
        wasted_slots=cache.wasted_slots,
        total_swap_blocks=cache.swap.num_blocks,
        used_swap_blocks=cache.swap.num_in_use,
        cached_swap_blocks=cache.swap.num_cached,
        step_seconds=step_seconds,
        draining=draining,
        drafted_tokens=scheduler.counters["drafted_tokens"],
        accepted_tokens=scheduler.counters["accepted_tokens"],
        disk_blocks=0 if read_ahead is None or not read_ahead.tier else len(read_ahead.tier.held),
        disk_read_share=0 if read_ahead is None else read_ahead.read_share,
    )
