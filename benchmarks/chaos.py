"""Inject many kinds of faults for ten minutes; every stream must end as in a run without faults.

    python -m benchmarks.chaos [--minutes 10] [--streams 40] [--engines 3]

Engines run behind a router that requires keys. Meanwhile

- engines are killed (SIGKILL) or stopped for a while (SIGSTOP), one at a time;
- the tenants' file is rewritten every five seconds, two times in three with errors.

Every request must return the tokens, text and counts of a run without faults. At the end no engine
has a request or a block in use, and no process is left.
"""

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.fixture import Node, engine, make_model, router, serving, write_tenants
from benchmarks.migration import HEARTBEAT_SECONDS, MIGRATION, Outcome, make_asks, settle, stream
from octavo import AsyncClient

KEY = "load"
REWRITE_SECONDS = 5.0
PAUSE_SECONDS = 2.0
"""Seconds between two faults."""
SETTLE_SECONDS = 60.0
"""Maximum seconds until engines are idle at the end."""


@dataclass
class Service:
    """A router, its engines, and the tenants' file that `tamper` rewrites."""

    front: Node
    engines: list[Node]
    client: AsyncClient
    tenants: Path


@asynccontextmanager
async def service(model: str, directory: Path, engines: int) -> AsyncIterator[Service]:
    """Start everything."""
    tenants = write_tenants(directory / "tenants.toml", {KEY: 1})
    nodes = [engine(model, compile="auto", max_num_seqs=64) for _ in range(engines)]
    addresses = [node.address for node in nodes]
    front = router(addresses, tenants=tenants, migration_timeout=300, **MIGRATION)
    async with serving(nodes, front, api_key=KEY) as client:
        yield Service(front, nodes, client, tenants)


BAD_TENANTS = (
    "",
    "[load\n",
    "a = " + 50_000 * "[" + 50_000 * "]",
    "a = " + "9" * 5001,
    '[load]\nkeys = ["not a hash"]\n',
    "\ufffd\x00",
)


async def rewrite_tenants(path: Path, events: Counter[str]) -> None:
    """Rewrite the tenants' file repeatedly; every third version is valid."""
    for number in itertools.count():
        if number % 3 == 0:
            weights = {KEY: 1.0, f"other-{number}": 1.0 + number % 5}
            await asyncio.to_thread(write_tenants, path, weights)
            events["tenants files"] += 1
        else:
            await asyncio.to_thread(path.write_text, BAD_TENANTS[number % len(BAD_TENANTS)])
            events["bad tenants files"] += 1
        await asyncio.sleep(REWRITE_SECONDS)


async def strike(
    served: Service, events: Counter[str], over: asyncio.Event, seconds: float
) -> None:
    """Kill and stop engines, one at a time, for `seconds` seconds."""
    draw = random.Random(0)
    began = time.monotonic()
    for number in itertools.count():
        await asyncio.sleep(PAUSE_SECONDS)
        if time.monotonic() - began > seconds:
            break
        victim = served.engines[number % len(served.engines)]
        if number % 3 == 2:
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(draw.uniform(1, 3) * HEARTBEAT_SECONDS)
            victim.signal(signal.SIGCONT)
            events["stops"] += 1
            continue
        await victim.kill()
        events["kills"] += 1
        await victim.start()
        events["restarts"] += 1
    over.set()


async def left_over(served: Service) -> list[str]:
    """Return the requests and blocks that engines hold after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        held = []
        for node in served.engines:
            metrics = await asyncio.to_thread(node.metrics)
            for name, state in (("groups", "running"), ("groups", "waiting"), ("blocks", "used")):
                if value := metrics.value(f"octavo_engine_{name}", state=state):
                    held.append(f"engine at {node.address}: {value:g} {state} {name}")
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.5)


async def measure(minutes: float, streams: int, engines: int) -> bool:
    """Run everything and print the results; return True if nothing failed."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = make_model(directory / "model")
        outcome, events, over = Outcome(), Counter[str](), asyncio.Event()
        async with service(model, directory, engines) as served:
            asks = await settle(served.client, make_asks(2 * streams, tokens=200))
            print(f"{len(asks)} requests, {streams} streams, {engines} engines", flush=True)
            rewriting = asyncio.create_task(rewrite_tenants(served.tenants, events))
            await asyncio.gather(
                strike(served, events, over, 60 * minutes),
                *(stream(served.client, asks, i, outcome, over) for i in range(streams)),
            )
            rewriting.cancel()
            held = await left_over(served)
            outcome.migrations = int(served.front.metrics().value("octavo_router_migrations_total"))
        held += [f"process {child.pid}: {child.name()}" for child in _children()]
    print(", ".join(f"{count} {name}" for name, count in events.items()))
    print(f"{outcome}, {len(held)} left over")
    problems = outcome.problems() + held
    for what in problems[:10]:
        print(f"  {what}")
    return not problems


def _children() -> list[psutil.Process]:
    """Return this process' descendants except multiprocessing's own two."""
    helpers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if not any(part in argument for part in helpers for argument in child.cmdline())
    ]


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--engines", type=int, default=3)
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
