"""Tenants at one engine, played through step by step: no clock, no chance but the seed's."""

import asyncio
import random
from dataclasses import dataclass, field
from statistics import quantiles

import pytest

from octavo.router.admission import QueueLimits
from octavo.router.admission.ticket import NoProgress
from octavo.router.tenants.tenant import Tenant
from tests.router.admission.fixture import BLOCK, Gate, Replica, settle, ticket

PLACES = 32
STEP = 0.025
OUTPUT = 100
CAPACITY = PLACES / STEP / OUTPUT


@dataclass
class Play:
    """An engine of so many places whose every sequence has a token each step."""

    gate: Gate = field(default_factory=lambda: Gate(Replica(PLACES)))
    running: list = field(default_factory=list)  # in the order of coming, as the engine has them
    waits: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    tasks: set[asyncio.Task] = field(default_factory=set)

    def ask(self, tenant: Tenant, prompt: int = BLOCK, output: int = OUTPUT) -> None:
        t = ticket(
            self.gate.now,
            prompt_tokens=prompt,
            min_tokens=output,
            max_tokens=output,
            tenant=tenant,
            progress=NoProgress(),
        )
        task = asyncio.create_task(self._serve(t))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, t) -> None:
        grant = await self.gate.admit(t)
        self.running.append(grant)

    async def step(self) -> None:
        self.gate.now += STEP
        await settle()
        ended = []
        for grant in self.running[:PLACES]:
            t = grant.claim.ticket
            if not t.progress.output_tokens:
                self.waits.setdefault(t.tenant.name, []).append(self.gate.now - t.arrival)
                t.progress.first_time = self.gate.now
            t.progress.output_tokens += 1
            t.progress.last_time = self.gate.now
            name = t.tenant.name
            prompt = t.prompt_tokens if t.progress.output_tokens == 1 else 0
            self.tokens[name] = self.tokens.get(name, 0) + prompt + 2
            if t.progress.output_tokens == t.max_tokens:
                t.progress.lengths = [t.max_tokens]
                ended.append(grant)
        for grant in ended:
            self.running.remove(grant)
            self.gate.release(grant)
        await settle()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def flooded(times: float, seconds: float = 60.0) -> list[float]:
    """Returns a modest tenant's times to first token beside one that sends so much more.

    Those of the first seconds do not count: an engine is filled before anybody
    knows that there is another tenant.
    """
    draw = random.Random(1)
    rates = {Tenant("modest"): CAPACITY / 4, Tenant("flood"): times * CAPACITY / 4}
    play = Play(Gate(Replica(PLACES), limits=QueueLimits(10**6, 10**9, 10**6)))
    due = {tenant: draw.expovariate(rate) for tenant, rate in rates.items()}
    while play.gate.now < seconds:
        for tenant, rate in rates.items():
            while due[tenant] < play.gate.now:
                due[tenant] += draw.expovariate(rate)
                play.ask(tenant)
        await play.step()
        if play.gate.now < 5.0:
            play.waits.clear()
    await play.close()
    return play.waits["modest"]


async def contended(weights, seconds: float = 40.0):
    """Returns the weighted tokens of two tenants that keep the engine busy."""
    play = Play()
    sizes = dict(zip(weights, [(16, 40), (64, 24)], strict=True))

    def keep_busy():
        waiting = play.gate._queues["m"].waiters.all()
        for tenant in weights:
            mine = sum(waiter.tenant == tenant.name for waiter in waiting)
            for _ in range(48 - mine):
                play.ask(tenant, *sizes[tenant])

    while play.gate.now < seconds:
        keep_busy()
        await play.step()
    await play.close()
    return play.tokens


async def test_a_flood_hardly_moves_anothers_time_to_first_token():
    quiet, loud = [quantiles(await flooded(times), n=100)[98] for times in (1, 20)]
    assert loud <= 1.25 * quiet


@pytest.mark.parametrize("weight", [1.0, 2.0])
async def test_tenants_that_both_want_all_have_their_weights_shares(weight):
    tokens = await contended((Tenant("a"), Tenant("b", weight)))
    assert tokens["b"] / weight == pytest.approx(tokens["a"], rel=0.05)
