"""Everything goes wrong for ten minutes, and each stream must end as if nothing had.

    python -m benchmarks.chaos [--minutes 10] [--streams 40] [--engines 3]

Compiled engines behind a router that asks for keys. Meanwhile

- one engine after another is killed (SIGKILL) or stopped for a while (SIGSTOP), the
  next not before the one before it is back;
- before some restarts, the compiled step on disk is damaged: a library that is cut
  in half or empty, flipped bytes of weights, a manifest that is no JSON;
- the file of tenants is written anew every five seconds, two times in three badly.

Every request must be completed, with the tokens, words and counts of an undisturbed
run. At the end no engine has a request or a block in use, and no process is left.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.fleet import Node, all_up, engine, make_model, router
from benchmarks.metrics import Metrics
from benchmarks.migration import HEARTBEAT_SECONDS, Outcome, make_asks, settle, stream
from octavo import AsyncClient
from octavo.common.models.cache import cache_dir
from octavo.common.ports import free_port
from octavo.router.tenants.tenant import hash_key

KEY = "chaos"
REWRITE_SECONDS = 5.0
PAUSE_SECONDS = 2.0
"""Between two strikes."""
COMPILE_SECONDS = 600.0
"""What an engine has to compile the model."""
SETTLE_SECONDS = 60.0
"""What engines have to become idle at the end."""


@dataclass
class Service:
    """Processes, and the files that are tampered with.

    Attributes:
        front: the router.
        engines: behind it.
        metrics_ports: of the engines.
        router_metrics: the router's metrics port.
        tenants: the file of tenants.
        cache: where compiled steps are.
    """

    front: Node
    engines: list[Node]
    metrics_ports: list[int]
    router_metrics: int
    tenants: Path
    cache: Path


@dataclass
class Events:
    """What was done, by name."""

    counts: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def service(model: str, directory: Path, engines: int) -> AsyncIterator[Service]:
    """Start everything once the model has been compiled, by an engine that ends again."""
    tenants = directory / "tenants.toml"
    tenants.write_text(good_tenants(0))
    compiling = engine(model, compile="wait")
    try:
        await compiling.start(COMPILE_SECONDS)
    finally:
        await compiling.close()
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        nodes, ports = [], []
        for _ in range(engines):
            ports.append(free_port())
            nodes.append(
                await start(engine(model, compile="auto", max_num_seqs=64, metrics_port=ports[-1]))
            )
        router_metrics = free_port()
        front = await start(
            router(
                [node.address for node in nodes],
                tenants=tenants,
                heartbeat_timeout=HEARTBEAT_SECONDS,
                connect_timeout=HEARTBEAT_SECONDS,
                max_moves=1000,
                failover_timeout=300,
                metrics_port=router_metrics,
            )
        )
        await all_up(front, engines, api_key=KEY)
        yield Service(front, nodes, ports, router_metrics, tenants, cache_dir())


# The file of tenants.


def good_tenants(number: int) -> str:
    """Return a file with the key that the streams use, and another that changes."""
    return (
        f'[load]\nkeys = ["{hash_key(KEY)}"]\n'
        f'[other]\nkeys = ["{hash_key(f"other-{number}")}"]\nweight = {1 + number % 5}\n'
    )


BAD_TENANTS = (
    "",
    "[load\n",
    "a = " + 50_000 * "[" + 50_000 * "]",
    "a = " + "9" * 5001,
    '[load]\nkeys = ["not a hash"]\n',
    "\ufffd\x00",
)


async def rewrite_tenants(path: Path, events: Events) -> None:
    """Write the file anew again and again; every third time it is right."""
    for number in itertools.count():
        good = number % 3 == 0
        text = good_tenants(number) if good else BAD_TENANTS[number % len(BAD_TENANTS)]
        await asyncio.to_thread(path.write_text, text)
        events.counts["tenants files" if good else "bad tenants files"] += 1
        await asyncio.sleep(REWRITE_SECONDS)


# Compiled steps.


def cut_in_half(file: Path) -> None:
    """Truncate a file."""
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    """Leave nothing of a file."""
    os.truncate(file, 0)


def flip(file: Path) -> None:
    """Invert bytes in the middle of a file."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        old = opened.read(64)
        opened.seek(-len(old), os.SEEK_CUR)
        opened.write(bytes(255 - byte for byte in old))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (cut_in_half, "*.so"),
    (flip, "*.so"),
    (empty, "*.so"),
    (flip, "reference.safetensors"),
    (cut_in_half, "step.json"),
]


def damage(cache: Path, number: int) -> bool:
    """Damage the compiled step on disk, if there is one.

    A copy takes its place: engines that run have mapped the file that they loaded.
    """
    how, pattern = DAMAGE[number % len(DAMAGE)]
    found = False
    for manifest in cache.glob("*/*/step.json"):
        for file in manifest.parent.glob(pattern):
            copy = file.with_suffix(".copy")
            copy.write_bytes(file.read_bytes())
            copy.chmod(0o644)
            how(copy)
            copy.replace(file)
            found = True
    return found


# Trouble and load.


async def strike(served: Service, events: Events, over: asyncio.Event, seconds: float) -> None:
    """Kill and stop engines, one at a time, for so many seconds."""
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
            events.counts["stops"] += 1
            continue
        await victim.kill()
        events.counts["kills"] += 1
        if number % 4 == 1 and damage(served.cache, events.counts["damaged artifacts"]):
            events.counts["damaged artifacts"] += 1
        await victim.start()
        events.counts["restarts"] += 1
    over.set()


async def left_over(served: Service) -> list[str]:
    """Return what engines and router still hold once they have had time to let it go."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        held = []
        for port in served.metrics_ports:
            metrics = await asyncio.to_thread(Metrics, port)
            for name, state in (("groups", "running"), ("groups", "waiting"), ("blocks", "used")):
                if value := metrics.value(f"octavo_engine_{name}", state=state):
                    held.append(f"engine at {port}: {value:g} {state} {name}")
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.5)


async def measure(minutes: float, streams: int, engines: int) -> bool:
    """Run it all and print what came of it; return whether all was well."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["OCTAVO_CACHE_DIR"] = str(directory / "cache")
        (directory / "model").mkdir()
        model = make_model(directory / "model")
        outcome, events, over = Outcome(), Events(), asyncio.Event()
        async with (
            service(model, directory, engines) as served,
            AsyncClient(served.front.address, api_key=KEY) as client,
        ):
            asks = await settle(client, make_asks(2 * streams, tokens=200), model)
            print(f"{len(asks)} requests, {streams} streams, {engines} engines", flush=True)
            rewriting = asyncio.create_task(rewrite_tenants(served.tenants, events))
            await asyncio.gather(
                strike(served, events, over, 60 * minutes),
                *(stream(client, asks, i, outcome, over) for i in range(streams)),
            )
            rewriting.cancel()
            held = await left_over(served)
            moves = Metrics(served.router_metrics).value("octavo_router_moves_total")
        held += [f"process {child.pid}: {child.name()}" for child in _children()]
    print(", ".join(f"{count} {name}" for name, count in events.counts.items()))
    print(
        f"{outcome.completed} completed ({outcome.tokens} tokens), {outcome.refused} refused at"
        f" first, {len(outcome.failures)} failed, {len(outcome.different)} different,"
        f" {moves:g} moves, {len(held)} left over"
    )
    for what in (outcome.failures + outcome.different + held)[:10]:
        print(f"  {what}")
    return not (outcome.failures or outcome.different or held)


def _children() -> list[psutil.Process]:
    """Return processes of this one that compute or serve: all but multiprocessing's own two."""
    own = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if not any(part in argument for part in own for argument in child.cmdline())
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
