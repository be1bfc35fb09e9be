"""What requests take of an engine: now, and at the worst moment to come."""

from octavo.v1 import engine_pb2
from router.admission.output_lengths import LIKELY, OutputLengths
from router.admission.ticket import Ticket

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

    __slots__ = ("_block_size", "_cached", "sequences")

    def __init__(self, block_size: int) -> None:
        self.sequences = 0
        self._block_size = block_size
        self._cached: dict[Claim, int] = {}  # blocks that each was to find in the cache

    def add(self, claim: Claim, cached_tokens: int) -> None:
        """Counts a request, `cached_tokens` of whose prompt the engine is to find cached."""
        self._cached[claim] = cached_tokens // self._block_size
        self.sequences += claim.ticket.sequences

    def remove(self, claim: Claim) -> None:
        """Counts a request no more."""
        del self._cached[claim]
        self.sequences -= claim.ticket.sequences

    def fits(self, claim: Claim, cached_tokens: int, load: engine_pb2.Load) -> bool:
        """Says whether the engine's blocks will do for one more request, all along.

        Args:
            claim: The request.
            cached_tokens: Of its prompt, what the engine is believed to hold.
            load: What the engine reported last: its blocks, and what waits for
                them, other routers' requests included.
        """
        size = self._block_size
        blocks = claim.blocks(size) - cached_tokens // size
        unseen = [c for c in self._cached if not c.drawn]
        strangers = max(0, load.waiting - len(unseen))
        room = load.free_blocks + load.cached_blocks - load.used_swap_blocks - strangers * blocks
        return blocks <= room and self._peak(claim, blocks) <= room

    def _peak(self, newcomer: Claim, blocks: int) -> float:
        """Returns the most blocks that all will need at one time, beyond those in use now.

        The worst moments are those just before a request ends and frees its
        own; by then all that go on have grown by what that one had still to
        come (the Past-Future scheduler, ASPLOS 2025, has it so).
        """
        size = self._block_size
        needed = float(blocks)
        growing = [(newcomer.expected, newcomer.ticket.sequences, blocks)]
        for claim, cached in self._cached.items():
            held = claim.blocks(size) - cached
            if not claim.drawn:  # the engine's report does not have its prompt yet
                needed += held
            growing.append((claim.remaining, claim.ticket.sequences, held))
        growing.sort()
        sequences = sum(s for _, s, _ in growing)
        peak = needed
        for remaining, own, held in growing:
            peak = max(peak, needed + sequences * remaining / size)
            sequences -= own
            needed -= held
        return peak
