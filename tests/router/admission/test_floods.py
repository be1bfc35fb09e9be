"""Tenants at one engine, simulated step by step: no clock, and no randomness but the seed's."""

import asyncio
import random
from dataclasses import dataclass, field
from statistics import quantiles

import pytest

from octavo.router.admission import QueueLimits
from octavo.router.tenants.tenant import Tenant
from tests.router.admission.fixture import BLOCK, ManualAdmission, Replica, request, settle

PLACES = 32
STEP = 0.025
OUTPUT = 100
CAPACITY = PLACES / STEP / OUTPUT


@dataclass
class Play:
    """An engine with `PLACES` slots, in which every sequence gets one token per step."""

    admission: ManualAdmission = field(default_factory=lambda: ManualAdmission(Replica(PLACES)))
    running: list = field(default_factory=list)  # in order of arrival, as in the engine
    waits: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    tasks: set[asyncio.Task] = field(default_factory=set)

    def ask(self, tenant: Tenant, prompt: int = BLOCK, output: int = OUTPUT) -> None:
        state = request(
            self.admission.now,
            prompt_tokens=prompt,
            min_tokens=output,
            max_tokens=output,
            tenant=tenant,
        )
        task = asyncio.create_task(self._serve(state))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, state) -> None:
        self.running.append(await self.admission.admit(state))

    async def step(self) -> None:
        self.admission.now += STEP
        await settle()
        ended = []
        for claim in self.running[:PLACES]:
            state, asked = claim.state, claim.request
            name = claim.tenant
            prompt = 0
            if not state.output_tokens:
                self.waits.setdefault(name, []).append(self.admission.now - asked.arrival)
                state.first_time = self.admission.now
                prompt = len(asked.prompt)
            state.output_tokens += 1
            state.last_time = self.admission.now
            self.tokens[name] = self.tokens.get(name, 0) + prompt + 2
            if state.output_tokens == asked.max_tokens:
                state.lengths = [asked.max_tokens]
                ended.append(claim)
        for claim in ended:
            self.running.remove(claim)
            self.admission.release(claim)
        await settle()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def flooded(times: float, seconds: float = 60.0) -> list[float]:
    """Return a modest tenant's times to first token beside one that sends `times` as much.

    The first seconds do not count: the engine fills before the second tenant is known.
    """
    draw = random.Random(1)
    rates = {Tenant("modest"): CAPACITY / 4, Tenant("flood"): times * CAPACITY / 4}
    play = Play(ManualAdmission(Replica(PLACES), limits=QueueLimits(10**6, 10**9, 10**6)))
    due = {tenant: draw.expovariate(rate) for tenant, rate in rates.items()}
    while play.admission.now < seconds:
        for tenant, rate in rates.items():
            while due[tenant] < play.admission.now:
                due[tenant] += draw.expovariate(rate)
                play.ask(tenant)
        await play.step()
        if play.admission.now < 5.0:
            play.waits.clear()
    await play.close()
    return play.waits["modest"]


async def contended(weights, seconds: float = 40.0):
    """Return the weighted tokens of two tenants that keep the engine busy."""
    play = Play()
    sizes = dict(zip(weights, [(16, 40), (64, 24)], strict=True))

    def keep_busy():
        waiting = play.admission._queues["m"].waiters
        for tenant in weights:
            mine = sum(claim.tenant == tenant.name for claim in waiting)
            for _ in range(48 - mine):
                play.ask(tenant, *sizes[tenant])

    while play.admission.now < seconds:
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
