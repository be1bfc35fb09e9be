"""Claims: the blocks that requests need on an engine, now and at their peak."""

from asyncio import Future, TimerHandle
from bisect import insort
from collections.abc import Sequence
from heapq import merge
from typing import Any, Generic, TypeVar

from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.router.admission.output_lengths import OutputLengths
from octavo.router.requests.embedding import EmbeddingState
from octavo.router.requests.state import RequestState
from octavo.v1 import engine_pb2

OUTPUT_WEIGHT = 2.0
"""Cost of an output token in prompt tokens: prompt tokens are computed in batches, output tokens
one by one. The weight is that of the virtual token counter (Sheng et al., OSDI 2024)."""

E = TypeVar("E")
AnyState = RequestState | EmbeddingState


class Claim(Generic[E]):
    """A request in admission, once per attempt: first in the queue, then on an engine.

    Args:
        state: The request's state.
        lengths: Output lengths of the model's recent requests.
        number: Tie-breaker between requests of equal effective arrival.

    Attributes:
        state: The request.
        request: The request.
        sequences: Number of unfinished outputs when the attempt began.
        migrated: Whether the request had an engine before. If so, neither a full queue, nor the
            wait, nor the deadline's forecast refuses it.
        order: Sort key among the tenant's requests, lowest first.
        expected: Conservative estimate of each output's further tokens, made when the attempt
            began.
        charged: Weighted tokens charged to the tenant so far.
        since: Monotonic time at which the engine was granted.
        granted: Future of the engine, while the request waits.
        timer: Timer that refuses the request.
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

    def __init__(self, state: AnyState, lengths: OutputLengths, number: int = 0) -> None:
        self.state = state
        self.request = state.request
        self.sequences = state.sequences
        self.migrated = state.migrations > 0 or state.handed_over
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
        """The granted engine."""
        assert self._engine is not None, "not granted yet"
        return self._engine

    def grant(self, engine: E, now: float) -> None:
        """Set the engine."""
        self._engine = engine
        self.since = now

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        return self.request.tenant.name

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.request.model

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids of the prompt, for policies that use them."""
        return self.request.prompt

    def keys(self, block_size: int) -> list[int]:
        """Return the keys of the prompt's blocks; see `Request.keys`."""
        return self.request.keys(block_size)

    @property
    def length(self) -> int:
        """Mean number of tokens of the outputs so far."""
        return self.state.output_tokens // self.sequences

    @property
    def sampled(self) -> int:
        """Tokens sampled in this attempt, for all outputs."""
        return self.state.output_tokens - self._before

    @property
    def remaining(self) -> int:
        """Conservative estimate of each output's further tokens."""
        request, length = self.request, self.length
        max_tokens = max(request.max_tokens, length + 1)
        expected = self._lengths.expected(max_tokens, min_tokens=request.min_tokens, sampled=length)
        return expected - length

    @property
    def likely(self) -> int:
        """Median estimate of each output's total tokens."""
        request = self.request
        return self._lengths.expected(
            request.max_tokens, min_tokens=request.min_tokens, quantile=0.5
        )

    @property
    def tokens(self) -> int:
        """Expected tokens to compute: the unit of queue lengths and drain rates."""
        return len(self.prompt) + self.expected * self.sequences

    @property
    def charge(self) -> float:
        """The tenant's charge while the request runs: the greater of expected and actual cost."""
        return self._weighed(max(self.expected * self.sequences, self.sampled))

    @property
    def served(self) -> float:
        """The tenant's charge after the request has ended: the actual cost."""
        return self._weighed(self.sampled) if self.sampled else 0.0

    def blocks(self, budget: BlockBudget) -> int:
        """Return the KV blocks that the request holds once all tokens so far are computed."""
        return budget.needed(len(self.prompt), self.length, self.sequences)

    def _weighed(self, output_tokens: int) -> float:
        # A migrated request's prompt was charged at its first attempt.
        prompt_tokens = 0 if self.migrated else len(self.prompt)
        return prompt_tokens + OUTPUT_WEIGHT * output_tokens


class Claims:
    """The requests that this router sent to one engine, and a forecast of the blocks they need.

    The forecast counts blocks beyond those in use. Demand peaks just before a request ends and
    frees its blocks: until then, all others grow by the tokens that it had left (Past-Future
    scheduler, Gong et al., ASPLOS 2025).

    Args:
        budget: The engine's block budget.

    Attributes:
        sequences: Total number of the requests' sequences.
    """

    __slots__ = ("_budget", "_cached", "_growing", "_load", "_needed", "_unseen", "sequences")

    def __init__(self, budget: BlockBudget) -> None:
        self.sequences = 0
        self._budget = budget
        self._cached: dict[Claim[Any], int] = {}  # blocks expected to be cached
        self._load: engine_pb2.Load | None = None  # the forecast's report
        self._begin_forecast(None)

    def add(self, claim: Claim[Any], cached_tokens: int) -> None:
        """Add a request, of whose prompt the engine is expected to have `cached_tokens` cached."""
        self._cached[claim] = self._budget.cached(cached_tokens)
        self._foresee(claim, self._cached[claim])
        self.sequences += claim.sequences

    def remove(self, claim: Claim[Any]) -> None:
        """Remove a request."""
        del self._cached[claim]
        self._load = None
        self.sequences -= claim.sequences

    def to_come(self) -> list[int]:
        """Return each sequence's expected further tokens, in ascending order."""
        return sorted(c.remaining for c in self._cached for _ in range(c.sequences))

    def fits(self, claim: Claim[Any], cached_tokens: int, load: engine_pb2.Load) -> bool:
        """Return whether one more request is predicted to find enough blocks until its end.

        Args:
            claim: The request.
            cached_tokens: Prompt tokens assumed to be in the engine's cache.
            load: The engine's last report: its blocks, and the waiting requests of all routers.
        """
        if load is not self._load:
            self._begin_forecast(load)
        blocks = claim.blocks(self._budget) - self._budget.cached(cached_tokens)
        strangers = max(0, load.waiting - self._unseen)
        room = load.free_blocks + load.cached_blocks - load.used_swap_blocks - strangers * blocks
        return blocks <= room and self._peak(claim, blocks) <= room

    def _begin_forecast(self, load: engine_pb2.Load | None) -> None:
        """Make a new forecast from an engine's report."""
        self._load = load
        self._unseen = 0  # requests missing from the report
        self._needed = 0  # blocks for their prompts
        # Each request's remaining tokens, sequences and held blocks; sorted.
        self._growing: list[tuple[int, int, int]] = []
        for running, cached in self._cached.items():
            self._foresee(running, cached)

    def _foresee(self, claim: Claim[Any], cached: int) -> None:
        """Add a request that shares `cached` blocks with others to the forecast."""
        held = claim.blocks(self._budget) - cached
        if not claim.sampled:
            self._unseen += 1
            self._needed += held
        insort(self._growing, (claim.remaining, claim.sequences, held))

    def _peak(self, newcomer: Claim[Any], blocks: int) -> float:
        """Return the peak demand of blocks if one more request starts with `blocks`."""
        sequences = self.sequences + newcomer.sequences
        peak = needed = float(self._needed + blocks)
        newcomer_entry = (newcomer.expected, newcomer.sequences, blocks)
        for remaining, ending, held in merge(self._growing, (newcomer_entry,)):
            peak = max(peak, needed + sequences * remaining * self._budget.growth)
            sequences -= ending
            needed -= held
        return peak
