"""Admission to fake engines, with a clock that the test moves."""

import asyncio
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from octavo.common import rpc
from octavo.router.admission import Admission, Claim, QueueLimits
from octavo.router.admission.claims import Claims
from octavo.router.balancing import least_loaded
from octavo.router.metrics import RouterMetrics
from octavo.router.requests.request import Request
from octavo.router.requests.state import RequestState
from octavo.router.tenants.quota import Account
from octavo.router.tenants.tenant import ANONYMOUS, Tenant
from octavo.router.text.detokenizer import Pieces
from octavo.v1 import engine_pb2, generation_pb2
from tests.plain import budget

BLOCK = 16
PLENTY = QueueLimits(requests=100, tokens=1 << 20, seconds=600.0)
BLOCKS = 1 << 20
"""Number of blocks: more than any test here needs."""


@dataclass(eq=False)
class Replica:
    max_num_seqs: int = 1
    load: engine_pb2.Load = field(
        default_factory=lambda: engine_pb2.Load(total_blocks=BLOCKS, free_blocks=BLOCKS)
    )
    prefills: bool = False
    block_layout: str = "layout"
    saved: int = 0
    claims: Claims = field(default_factory=lambda: Claims(budget(BLOCKS, BLOCK)))

    @property
    def sequences(self):
        return self.claims.sequences

    def cached_tokens(self, prompt):
        return 0

    def saved_tokens(self, prompt):
        return self.saved

    def expect(self, prompt):
        pass


class ManualAdmission(Admission[Replica]):
    """Admission to some replicas, with a clock that the test moves; none is up while `down`."""

    def __init__(self, *replicas: Replica, limits: QueueLimits = PLENTY, outage: float = 600.0):
        self.replicas = replicas
        self.down = False
        self.now = 0.0
        super().__init__(
            self._up, least_loaded, limits, outage_seconds=outage, clock=lambda: self.now
        )

    def _up(self, model):
        if self.down or not self.replicas:
            raise rpc.unavailable("none is up")
        return [r for r in self.replicas if model in {"m", str(r.max_num_seqs)}]

    def fill(self, replica: Replica, sequences: int | None = None) -> list[Claim]:
        """Give a replica as many sequences as it takes, or `sequences`."""
        most = replica.max_num_seqs + max(1, replica.max_num_seqs // 8)
        count = most - replica.sequences if sequences is None else sequences
        return [self.grant(request(), replica) for _ in range(count)]

    def grant(self, state: RequestState, replica: Replica) -> Claim:
        claim = self._claim(state)
        self._grant(self._queues["m"], claim, replica)
        return claim


METRICS = RouterMetrics(CollectorRegistry(), in_flight=lambda: 0, queued=lambda: 0)
PIECES = Pieces(lambda token_ids: "", [], frozenset(), byte_fallback=False)


class ScriptedState(RequestState):
    """A request whose progress the test sets."""

    output_tokens = 0
    lengths = ()
    first_time = None
    last_time = 0.0


def request(
    arrival: float = 0.0,
    *,
    priority: int = 0,
    sequences: int = 1,
    model: str = "m",
    prompt_tokens: int = 1,
    min_tokens: int = 0,
    max_tokens: int = 1,
    deadline: float | None = None,
    migrated: bool = False,
    tenant: Tenant = ANONYMOUS,
) -> ScriptedState:
    message = generation_pb2.GenerateRequest(
        priority=priority, sampling={"n": sequences}, stop={"min_tokens": min_tokens}
    )
    asked = Request(
        request_id="",
        model=model,
        tenant=tenant,
        message=message,
        prompt=[0] * prompt_tokens,
        max_tokens=max_tokens,
        arrival=arrival,
        deadline=deadline,
    )
    with Account(tenant, METRICS).request() as usage:
        state = ScriptedState(
            asked,
            PIECES,
            usage=usage,
            metrics=METRICS.of(model),
            message_interval=float,
            max_unread_tokens=1,
        )
    state.migrations = int(migrated)
    return state


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)
