"""The blocks that requests need on an engine: now, and at their peak."""

from asyncio import Future, TimerHandle
from bisect import insort
from collections.abc import Sequence
from heapq import merge
from typing import Any, Generic, TypeVar

from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.router.admission.output_lengths import OutputLengths
from octavo.router.requests.state import RequestState
from octavo.v1 import engine_pb2

OUTPUT_WEIGHT = 2.0
"""Prompt tokens that an output token counts for between tenants: prompt tokens are computed many
at a time, output tokens one after the other. The weight is that of the virtual token counter's
paper."""

E = TypeVar("E")


class Claim(Generic[E]):
    """A request's way through admission, once per attempt: in the queue, then at an engine.

    Args:
        state: The request.
        lengths: Lengths of its model's recent outputs.
        number: Decides between requests of equal arrival and priority.

    Attributes:
        state: The request.
        request: The request.
        sequences: Its outputs that had not ended when it asked for an engine.
        migrated: Whether it has lost an engine. It is then not refused for a full queue, nor
            for how long it has waited or will take.
        order: Its place among its tenant's requests, lowest first.
        expected: Tokens that each of its outputs was expected to have yet when
            it asked for an engine, on the safe side.
        charged: Weighted tokens that its tenant has been charged for it.
        since: Time at which it was given an engine, by the monotonic clock.
        granted: Resolved with the engine, while it waits.
        timer: Ends its waiting.
    """

    __slots__ = (
        "_before",
        "_engine",
        "_lengths",
        "charged",
        "expected",
        "granted",
        "migrated",
        "order",
        "request",
        "sequences",
        "since",
        "state",
        "timer",
    )

    def __init__(self, state: RequestState, lengths: OutputLengths, number: int = 0) -> None:
        self.state = state
        self.request = state.request
        self.sequences = state.sequences
        self.migrated = state.migrations > 0
        self.order = (state.request.effective_arrival, number)
        self.charged = 0.0
        self.since = 0.0
        self.granted: Future[E] | None = None
        self.timer: TimerHandle | None = None
        self._engine: E | None = None
        self._lengths = lengths
        self._before = state.output_tokens
        self.expected = self.remaining

    @property
    def engine(self) -> E:
        """The engine that it was given."""
        assert self._engine is not None, "not granted yet"
        return self._engine

    def grant(self, engine: E, now: float) -> None:
        """Give it an engine."""
        self._engine = engine
        self.since = now

    @property
    def tenant(self) -> str:
        """Name of its tenant."""
        return self.request.tenant.name

    @property
    def model(self) -> str:
        """Name of its model."""
        return self.request.model

    @property
    def prompt(self) -> Sequence[int]:
        """Its prompt's tokens, for policies that go by it."""
        return self.request.prompt

    def keys(self, block_size: int) -> list[int]:
        """Return the keys of its prompt's blocks; see `Request.keys`."""
        return self.request.keys(block_size)

    @property
    def length(self) -> int:
        """Mean tokens of its outputs so far."""
        return self.state.output_tokens // self.sequences

    @property
    def sampled(self) -> int:
        """Tokens sampled for all outputs since it asked for an engine."""
        return self.state.output_tokens - self._before

    @property
    def remaining(self) -> int:
        """Further tokens that each output is expected to have, on the safe side."""
        request, length = self.request, self.length
        max_tokens = max(request.max_tokens, length + 1)
        expected = self._lengths.expected(max_tokens, min_tokens=request.min_tokens, sampled=length)
        return expected - length

    @property
    def likely(self) -> int:
        """Median of the tokens that each output will have."""
        request = self.request
        return self._lengths.expected(
            request.max_tokens, min_tokens=request.min_tokens, quantile=0.5
        )

    @property
    def tokens(self) -> int:
        """Tokens expected to be computed for it: the unit of queue lengths and drain rates."""
        return len(self.prompt) + self.expected * self.sequences

    @property
    def charge(self) -> float:
        """The tenant's charge while it runs: the expected cost, or the actual cost if higher."""
        return self._weighed(max(self.expected * self.sequences, self.sampled))

    @property
    def served(self) -> float:
        """The tenant's charge once it has ended: the actual cost."""
        return self._weighed(self.sampled) if self.sampled else 0.0

    def blocks(self, budget: BlockBudget) -> int:
        """Return the KV blocks that it holds once all tokens so far are computed."""
        return budget.needed(len(self.prompt), self.length, self.sequences)

    def _weighed(self, output_tokens: int) -> float:
        # The prompt of a request that migrated has been charged for.
        prompt_tokens = 0 if self.migrated else len(self.prompt)
        return prompt_tokens + OUTPUT_WEIGHT * output_tokens


class Claims:
    """The requests that this router has given one engine, and a forecast of the blocks they need.

    The forecast is of blocks beyond those in use. Peaks are just before a request ends and frees
    its blocks: by then all others have grown by the tokens that it had left (as in the Past-Future
    scheduler, ASPLOS 2025).

    Args:
        budget: The engine's blocks.

    Attributes:
        sequences: Number of sequences that they run together.
    """

    __slots__ = ("_budget", "_cached", "_growing", "_load", "_needed", "_unseen", "sequences")

    def __init__(self, budget: BlockBudget) -> None:
        self.sequences = 0
        self._budget = budget
        self._cached: dict[Claim[Any], int] = {}  # blocks that each was to find in the cache
        self._load: engine_pb2.Load | None = None  # the report that the forecast goes with
        self._begin_forecast(None)

    def add(self, claim: Claim[Any], cached_tokens: int) -> None:
        """Count a request, `cached_tokens` of whose prompt the engine is to find cached."""
        self._cached[claim] = self._budget.cached(cached_tokens)
        self._foresee(claim, self._cached[claim])
        self.sequences += claim.sequences

    def remove(self, claim: Claim[Any]) -> None:
        """Count a request no more."""
        del self._cached[claim]
        self._load = None
        self.sequences -= claim.sequences

    def to_come(self) -> list[int]:
        """Return the tokens that each sequence is expected to have yet, the fewest first."""
        return sorted(c.remaining for c in self._cached for _ in range(c.sequences))

    def fits(self, claim: Claim[Any], cached_tokens: int, load: engine_pb2.Load) -> bool:
        """Return whether the engine is predicted to have enough blocks for one more request's life.

        Args:
            claim: The request.
            cached_tokens: Tokens of its prompt that the engine is believed to hold.
            load: The engine's last report: its blocks, and what waits for
                them, other routers' requests included.
        """
        if load is not self._load:
            self._begin_forecast(load)
        blocks = claim.blocks(self._budget) - self._budget.cached(cached_tokens)
        strangers = max(0, load.waiting - self._unseen)
        room = load.free_blocks + load.cached_blocks - load.used_swap_blocks - strangers * blocks
        return blocks <= room and self._peak(claim, blocks) <= room

    def _begin_forecast(self, load: engine_pb2.Load | None) -> None:
        """Forecast anew, by a report of the engine."""
        self._load = load
        self._unseen = 0  # requests whose prompts the report does not have yet
        self._needed = 0  # blocks, by these prompts
        # Tokens left of each sequence, sequences, blocks held; sorted.
        self._growing: list[tuple[int, int, int]] = []
        for running, cached in self._cached.items():
            self._foresee(running, cached)

    def _foresee(self, claim: Claim[Any], cached: int) -> None:
        """Add a request to the forecast, `cached` blocks of which it shares with others."""
        held = claim.blocks(self._budget) - cached
        if not claim.sampled:
            self._unseen += 1
            self._needed += held
        insort(self._growing, (claim.remaining, claim.sequences, held))

    def _peak(self, newcomer: Claim[Any], blocks: int) -> float:
        """Return the peak of needed blocks if one more request starts with `blocks`."""
        sequences = self.sequences + newcomer.sequences
        peak = needed = float(self._needed + blocks)
        newcomer_entry = (newcomer.expected, newcomer.sequences, blocks)
        for remaining, ending, held in merge(self._growing, (newcomer_entry,)):
            peak = max(peak, needed + sequences * remaining * self._budget.growth)
            sequences -= ending
            needed -= held
        return peak
