"""Admission to engines that are not there, by a clock that the test moves."""

import asyncio
from dataclasses import dataclass, field

from octavo.common import rpc
from octavo.router.admission import Admission, QueueLimits, Ticket
from octavo.router.admission.claims import Claim, Claims
from octavo.router.balancing import LeastLoaded
from octavo.v1 import engine_pb2

BLOCK = 16
PLENTY = QueueLimits(requests=100, tokens=1 << 20, seconds=600.0)
BLOCKS = 1 << 20
"""More than anything here needs."""


@dataclass(eq=False)
class Replica:
    max_num_seqs: int = 1
    load: engine_pb2.Load = field(
        default_factory=lambda: engine_pb2.Load(total_blocks=BLOCKS, free_blocks=BLOCKS)
    )
    claims: Claims = field(default_factory=lambda: Claims(BLOCK))

    @property
    def sequences(self):
        return self.claims.sequences

    def cached_tokens(self, prompt):
        return 0

    def expect(self, prompt):
        pass


class Gate(Admission[Replica]):
    """Admission to some replicas, by a clock that the test moves; none is up while `down`."""

    def __init__(self, *replicas: Replica, limits: QueueLimits = PLENTY, outage: float = 600.0):
        self.replicas = replicas
        self.down = False
        self.now = 0.0
        super().__init__(
            self._up, LeastLoaded(), limits, outage_seconds=outage, clock=lambda: self.now
        )

    def _up(self, model):
        if self.down or not self.replicas:
            raise rpc.unavailable("none is up")
        return [r for r in self.replicas if model in {"m", str(r.max_num_seqs)}]

    def fill(self, replica: Replica, sequences: int | None = None) -> list:
        """Gives a replica all the sequences that it takes, or so many."""
        most = replica.max_num_seqs + max(1, replica.max_num_seqs // 8)
        count = most - replica.sequences if sequences is None else sequences
        queue = self._queues["m"]
        return [self._grant(queue, Claim(ticket(), queue.lengths), replica) for _ in range(count)]


def ticket(arrival: float = 0.0, *, priority: int = 0, sequences: int = 1, model="m", **fields):
    return Ticket(model, sequences, priority, arrival, **fields)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)
