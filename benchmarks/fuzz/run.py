"""Run numbered cases concurrently, beside an ordinary client."""

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import grpc.aio

from benchmarks.fuzz import calls, http2
from benchmarks.fuzz.calls import FaultError
from benchmarks.fuzz.fixture import Levels, Service

ATTACK_SHARE = 0.03
CHANNELS = 8
MOST_FAULTS = 20
ASK_SECONDS = 0.5
CLOSING_SECONDS = 1.0
"""Seconds to wait for closed connections to go before counting open ones."""
WARM_UP = 300
"""Warm-up cases before counting: some resources are allocated once."""


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        cases: Number of cases run.
        answers: Number of calls by method and code.
        attacks: Number of connections by kind.
        faults: Rules that a server broke.
        ordinary: Seconds of each of the ordinary client's requests.
        before: Resources of both processes before the cases; `after`: after them.
        seconds: Duration of all cases.
    """

    cases: int = 0
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    ordinary: list[float] = field(default_factory=list)
    before: dict[str, Levels] = field(default_factory=dict)
    after: dict[str, Levels] = field(default_factory=dict)
    seconds: float = 0.0


async def fuzz(
    served: Service, seed: int, numbers: Iterable[int], outcome: Outcome, *, workers: int = 64
) -> None:
    """Run the numbered cases of a seed and check resources afterwards; fill in `outcome`."""
    await _all(served, "warm-up", range(WARM_UP), Outcome(), workers)
    await served.ask()
    await asyncio.sleep(CLOSING_SECONDS)
    outcome.before = await served.settled(await asyncio.to_thread(served.levels))
    began = time.monotonic()
    asking = asyncio.create_task(_ask(served, outcome))
    await _all(served, str(seed), numbers, outcome, workers)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    outcome.seconds = time.monotonic() - began
    try:
        outcome.ordinary.append(await served.ask())
        outcome.after = await served.settled(outcome.before)
    except FaultError as error:
        outcome.faults.append(str(error))
    if logged := served.logged():
        outcome.faults.append(f"errors were logged:\n{logged[:20_000]}")


async def _all(
    served: Service, seed: str, numbers: Iterable[int], outcome: Outcome, workers: int
) -> None:
    left = iter(numbers)
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]  # otherwise they would share a connection
        channels = {
            node: [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(node.address, options=options)
                )
                for _ in range(CHANNELS)
            ]
            for node in (served.router, served.engine)
        }

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                if len(outcome.faults) >= MOST_FAULTS:
                    return
                rng = random.Random(f"{seed}:{number}")
                if rng.random() < ATTACK_SHARE:
                    await _attack(served, rng, number, outcome)
                else:
                    case = calls.make(rng)
                    node = served.engine if case.on_engine else served.router
                    await _call(case, channels[node][number % CHANNELS], number, outcome)
                outcome.cases += 1

        await asyncio.gather(*(work(left) for _ in range(workers)))
    gc.collect()  # calls in reference cycles hold connections


async def _call(case: calls.Case, channel: grpc.aio.Channel, number: int, outcome: Outcome) -> None:
    try:
        answer = await calls.run(case, channel)
    except FaultError as error:
        outcome.faults.append(f"case {number}: {error}\n  {case}")
    else:
        outcome.answers[case.method, answer] += 1


async def _attack(served: Service, rng: random.Random, number: int, outcome: Outcome) -> None:
    try:
        name = await http2.attack(rng, served.router.port, served.engine.port)
    except OSError as error:
        outcome.faults.append(f"case {number}: nothing listens: {error}")
    else:
        outcome.attacks[name] += 1


async def _ask(served: Service, outcome: Outcome) -> None:
    """Run the ordinary client."""
    while True:
        try:
            outcome.ordinary.append(await served.ask())
        except FaultError as error:
            outcome.faults.append(str(error))
        await asyncio.sleep(ASK_SECONDS)
