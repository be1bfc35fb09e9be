"""What requests take of an engine: now, and at the worst moment to come."""

from bisect import insort
from heapq import merge

from octavo.router.admission.output_lengths import LIKELY, OutputLengths
from octavo.router.admission.ticket import Ticket
from octavo.v1 import engine_pb2

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""What a token counts between tenants: those of a prompt are computed many at a time, those of
an output one after the other. The weights are those of the virtual token counter's paper."""


class Claim:
    """A ticket with what it is expected to come to.

    Args:
        ticket: The request.
        lengths: What is known of its model's outputs.

    Attributes:
        ticket: The request.
        expected: Tokens that each of its outputs was expected to have yet when
            it asked for an engine, on the safe side.
        charged: What its tenant has been charged for it.
        since: When it was given an engine, by the monotonic clock.
    """

    __slots__ = ("_before", "_lengths", "charged", "expected", "since", "ticket")

    def __init__(self, ticket: Ticket, lengths: OutputLengths) -> None:
        self.ticket = ticket
        self.charged = 0.0
        self.since = 0.0
        self._lengths = lengths
        self._before = ticket.progress.output_tokens
        self.expected = self.remaining

    @property
    def length(self) -> int:
        """Tokens that each of its outputs has, as a mean."""
        return self.ticket.progress.output_tokens // self.ticket.sequences

    @property
    def drawn(self) -> int:
        """Tokens that all of its outputs have had since it asked for an engine."""
        return self.ticket.progress.output_tokens - self._before

    @property
    def remaining(self) -> int:
        """Tokens that each of its outputs will have yet, on the safe side, by what has come."""
        ticket, length = self.ticket, self.length
        most = max(ticket.max_tokens, length + 1)
        expected = self._lengths.expected(most, min_tokens=ticket.min_tokens, drawn=length)
        return expected - length

    @property
    def likely(self) -> int:
        """Tokens that each output will have, as likely more as fewer."""
        ticket = self.ticket
        return self._lengths.expected(
            ticket.max_tokens, min_tokens=ticket.min_tokens, quantile=LIKELY
        )

    @property
    def tokens(self) -> int:
        """What is expected to be computed for it: the measure of queues and of their pace."""
        return self.ticket.prompt_tokens + self.expected * self.ticket.sequences

    @property
    def charge(self) -> float:
        """What its tenant is charged while it runs: what is expected, or what came if more."""
        return self._weighed(max(self.expected * self.ticket.sequences, self.drawn))

    @property
    def served(self) -> float:
        """What its tenant is charged in the end: for what it was given."""
        return self._weighed(self.drawn) if self.drawn else 0.0

    def blocks(self, block_size: int) -> int:
        """Returns the KV blocks that it holds once it is computed as far as it has come.

        Its outputs share the prompt's full blocks.
        """
        shared, rest = divmod(self.ticket.prompt_tokens, block_size)
        return shared + self.ticket.sequences * -(-(rest + self.length) // block_size)

    def _weighed(self, output_tokens: int) -> float:
        # The prompt of a request that lost its engine has been charged for.
        prompt_tokens = 0 if self.ticket.moved else self.ticket.prompt_tokens
        return PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens


class Claims:
    """The requests that this router has given one engine.

    Args:
        block_size: Tokens per KV block of the engine.

    Attributes:
        sequences: That they run, together.
    """

    __slots__ = ("_block_size", "_cached", "_forecast", "_load", "sequences")

    def __init__(self, block_size: int) -> None:
        self.sequences = 0
        self._block_size = block_size
        self._cached: dict[Claim, int] = {}  # blocks that each was to find in the cache
        self._load: engine_pb2.Load | None = None  # the report that the forecast goes with
        self._forecast = _Forecast(block_size)

    def add(self, claim: Claim, cached_tokens: int) -> None:
        """Counts a request, `cached_tokens` of whose prompt the engine is to find cached."""
        self._cached[claim] = cached_tokens // self._block_size
        self._forecast.add(claim, self._cached[claim])
        self.sequences += claim.ticket.sequences

    def remove(self, claim: Claim) -> None:
        """Counts a request no more."""
        del self._cached[claim]
        self._load = None
        self.sequences -= claim.ticket.sequences

    def to_come(self) -> list[int]:
        """Returns the tokens that each sequence is expected to have yet, the fewest first."""
        return sorted(c.remaining for c in self._cached for _ in range(c.ticket.sequences))

    def fits(self, claim: Claim, cached_tokens: int, load: engine_pb2.Load) -> bool:
        """Says whether the engine's blocks will do for one more request, all along.

        Args:
            claim: The request.
            cached_tokens: Of its prompt, what the engine is believed to hold.
            load: What the engine reported last: its blocks, and what waits for
                them, other routers' requests included.
        """
        size = self._block_size
        if load is not self._load:
            self._load, self._forecast = load, _Forecast(size)
            for running, cached in self._cached.items():
                self._forecast.add(running, cached)
        blocks = claim.blocks(size) - cached_tokens // size
        strangers = max(0, load.waiting - self._forecast.unseen)
        room = load.free_blocks + load.cached_blocks - load.used_swap_blocks - strangers * blocks
        return blocks <= room and self._forecast.peak(claim, blocks) <= room


class _Forecast:
    """The blocks that running requests will need beyond those in use, as they go on and end.

    The worst moments are those just before a request ends and frees its own; by
    then all that go on have grown by what that one had still to come (the
    Past-Future scheduler, ASPLOS 2025, has it so).

    Args:
        block_size: Tokens per block.

    Attributes:
        unseen: Requests whose prompts the engine's report does not have yet.
    """

    __slots__ = ("_block_size", "_growing", "_needed", "_sequences", "unseen")

    def __init__(self, block_size: int) -> None:
        self.unseen = 0
        self._block_size = block_size
        self._needed = 0  # by prompts that are not in the report
        self._sequences = 0
        # Tokens that each sequence has to come, sequences, blocks held; by the first.
        self._growing: list[tuple[int, int, int]] = []

    def add(self, claim: Claim, cached: int) -> None:
        """Adds a request, `cached` blocks of which it shares with others."""
        held = claim.blocks(self._block_size) - cached
        if not claim.drawn:
            self.unseen += 1
            self._needed += held
        self._sequences += claim.ticket.sequences
        insort(self._growing, (claim.remaining, claim.ticket.sequences, held))

    def peak(self, newcomer: Claim, blocks: int) -> float:
        """Returns the most that will be needed at a time if one more has `blocks` at once."""
        sequences = self._sequences + newcomer.ticket.sequences
        peak = needed = float(self._needed + blocks)
        own = (newcomer.expected, newcomer.ticket.sequences, blocks)
        for remaining, ending, held in merge(self._growing, (own,)):
            peak = max(peak, needed + sequences * remaining / self._block_size)
            sequences -= ending
            needed -= held
        return peak
