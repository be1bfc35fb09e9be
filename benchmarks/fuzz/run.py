"""Cases by number, many at a time, beside an ordinary client."""

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
from benchmarks.fuzz.stand import Levels, Stand

ATTACK_SHARE = 0.03
CHANNELS = 8
MOST_FAULTS = 20
ASK_SECONDS = 0.5
CLOSING_SECONDS = 1.0
"""What closed connections get to be gone before what is open is counted."""
WARM_UP = 300
"""Cases before anything is counted, so that what is made once has been made."""


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        cases: that were run.
        answers: of calls, by method and code.
        attacks: connections, by kind.
        faults: what should not have been.
        ordinary: seconds that the ordinary client's requests took.
        before: levels of both processes.
        after: levels of both processes.
        seconds: that the cases took.
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
    stand: Stand, seed: int, numbers: Iterable[int], outcome: Outcome, *, workers: int = 64
) -> None:
    """Runs the numbered cases of a seed, and looks at what they leave; fills in `outcome`."""
    await _all(stand, "warm-up", range(WARM_UP), Outcome(), workers)
    await stand.ask()
    await asyncio.sleep(CLOSING_SECONDS)
    outcome.before = await stand.settled(await asyncio.to_thread(stand.levels))
    began = time.monotonic()
    asking = asyncio.create_task(_ask(stand, outcome))
    await _all(stand, str(seed), numbers, outcome, workers)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    outcome.seconds = time.monotonic() - began
    try:
        outcome.ordinary.append(await stand.ask())
        outcome.after = await stand.settled(outcome.before)
    except FaultError as error:
        outcome.faults.append(str(error))
    if logged := stand.logged():
        outcome.faults.append(f"errors were logged:\n{logged[:20_000]}")


async def _all(
    stand: Stand, seed: str, numbers: Iterable[int], outcome: Outcome, workers: int
) -> None:
    left = iter(numbers)
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]  # or they would share a connection
        channels = {
            node: [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(node.address, options=options)
                )
                for _ in range(CHANNELS)
            ]
            for node in (stand.router, stand.engine)
        }

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                if len(outcome.faults) >= MOST_FAULTS:
                    return
                rng = random.Random(f"{seed}:{number}")
                if rng.random() < ATTACK_SHARE:
                    await _attack(stand, rng, number, outcome)
                else:
                    case = calls.make(rng)
                    node = stand.engine if case.on_engine else stand.router
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


async def _attack(stand: Stand, rng: random.Random, number: int, outcome: Outcome) -> None:
    try:
        name = await http2.attack(rng, stand.router.port, stand.engine.port)
    except OSError as error:
        outcome.faults.append(f"case {number}: an attack found nobody to attack: {error}")
    else:
        outcome.attacks[name] += 1


async def _ask(stand: Stand, outcome: Outcome) -> None:
    """Is an ordinary client."""
    while True:
        try:
            outcome.ordinary.append(await stand.ask())
        except FaultError as error:
            outcome.faults.append(str(error))
        await asyncio.sleep(ASK_SECONDS)
