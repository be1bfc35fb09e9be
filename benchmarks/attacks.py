"""Measure how attacks on the router affect other clients' latency and the router's memory.

    python -m benchmarks.attacks [--seconds 4] [--rounds 8] [--attack NAME ...]

A tenant with a key (the neighbour) sends short completions over HTTP from the attacker's address,
each on a new connection, in alternating rounds without and with an attack. The engine is paced, so
only the router is measured. The attacker is a separate process at the lowest priority, and its
rates are bounded. Each attack has a line that says whether

    latency     the neighbour's 99th percentile moves by less than 25%
    memory      of the router grows by less than 100 MB
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fixture import Node, make_model, router, serving, write_tenants
from benchmarks.paced_engine import paced_engine
from benchmarks.report import percentiles, table, verdict
from octavo import AsyncClient, Error
from octavo.common.ports import free_port

MB = 10**6
MIB = 1 << 20
STEP_SECONDS = 0.01
MAX_CONNECTIONS = 60
NEIGHBOURS = 2
"""Concurrent requests of the neighbour."""
PAUSE_SECONDS = 0.01
TIMEOUT_SECONDS = 120.0
COOL_SECONDS = 0.5
LATENCY_MARK = 0.25
MEMORY_MARK = 100 * MB
NEIGHBOUR, ATTACKER = "neighbour", "attacker"
"""Tenants; each one's key is its name."""

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "
SLOW = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"


@dataclass
class Outcome:
    """The effect of an attack on the neighbour and the router.

    Attributes:
        before: Seconds of each of the neighbour's requests without an attack.
        during: Seconds of each of its requests during the attack.
        failed: Errors of the neighbour's failed requests.
        grown: Maximum growth of the router's memory in bytes.
    """

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    grown: int = 0


@dataclass(frozen=True)
class Service:
    """A router in front of a paced engine, and its HTTP port."""

    router: Node
    http_port: int


@asynccontextmanager
async def service(directory: Path, tokenizer: str | None = None) -> AsyncIterator[Service]:
    """Start both; the default tokenizer is the byte tokenizer."""
    tenants = write_tenants(directory / "tenants.toml", {NEIGHBOUR: 1, ATTACKER: 1})
    source = tokenizer or make_model(directory)
    back = paced_engine(source, step_seconds=STEP_SECONDS, max_num_seqs=64)
    port = free_port()
    limits = {"max_connections": MAX_CONNECTIONS, "tenants": tenants, "http_port": port}
    front = router([back.address], **limits)
    async with serving([back], front, api_key=NEIGHBOUR):
        yield Service(front, port)


async def ask(port: int) -> float:
    """Request a short completion on a new connection; return its seconds.

    Raises:
        OSError: The router closed the connection.
        ValueError: It did not answer 200.
    """
    body = json.dumps({"prompt": "Say something.", "max_tokens": 2}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {NEIGHBOUR}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.transport.abort()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise ValueError(answer.partition(b"\r\n")[0].decode() or "closed without an answer")
    return time.monotonic() - began


async def neighbour(served: Service, seconds: float, took: list[float], failed: list[str]) -> None:
    """Send one request after another."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                took.append(await ask(served.http_port))
        except (OSError, ValueError, TimeoutError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(PAUSE_SECONDS)


async def measure(served: Service, attack: str, *, seconds: float, rounds: int) -> Outcome:
    """Measure in alternating rounds without and with an attack."""
    outcome = Outcome()
    warm: list[float] = []
    await _phase(served, min(seconds, 2.0), warm, outcome)
    start = served.router.rss()
    async with attacker(attack, served) as switch:
        for _ in range(rounds):
            await asyncio.sleep(COOL_SECONDS)
            await _phase(served, seconds, outcome.before, outcome)
            await switch(True)
            grown = await _phase(served, seconds, outcome.during, outcome)
            outcome.grown = max(outcome.grown, grown - start)
            await switch(False)
    return outcome


async def _phase(served: Service, seconds: float, took: list[float], outcome: Outcome) -> int:
    """Run the neighbour; return the router's peak memory."""
    tasks = [
        asyncio.create_task(neighbour(served, seconds, took, outcome.failed))
        for _ in range(NEIGHBOURS)
    ]
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, served.router.rss())
        await asyncio.sleep(0.05)
    return most


@asynccontextmanager
async def attacker(
    attack: str, served: Service
) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
    """Start a process that attacks while switched on; yield the switch."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_attacker,
        args=(attack, served.http_port, served.router.address, theirs),
        daemon=True,
    )
    process.start()
    theirs.close()

    async def switch(on: bool) -> None:
        ours.send(on)
        await asyncio.to_thread(ours.recv)

    try:
        yield switch
    finally:
        process.kill()
        process.join()
        ours.close()


def _attacker(attack: str, http_port: int, address: str, switch: Connection) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    asyncio.run(_obey(lambda: ATTACKS[attack](http_port, address), switch))


async def _obey(begin: Callable[[], Awaitable[None]], switch: Connection) -> None:
    task: asyncio.Future[None] | None = None
    while True:
        on = await asyncio.to_thread(switch.recv)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        task = asyncio.ensure_future(begin()) if on else None
        switch.send(on)


async def many(count: int, one: Callable[[], Awaitable[None]], *, pause: float) -> None:
    """Run `count` copies of a task; restart each a while after its end."""

    async def again(first: float) -> None:
        await asyncio.sleep(first)
        while True:
            with suppress(OSError, Error):
                await one()
            await asyncio.sleep(pause)

    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            tasks.create_task(again(i * pause / count))


@asynccontextmanager
async def connection(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection; abort it at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def half_headers(port: int, _: str) -> None:
    """Send half a header on 70 connections and wait."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            writer.write(HALF)
            await reader.read()

    await many(70, one, pause=1.0)


async def endless_headers(port: int, _: str) -> None:
    """Send a header of up to 50 MB on each of 8 connections."""

    async def one() -> None:
        async with connection(port) as (_, writer):
            writer.write(HALF)
            for _ in range(50 * MB >> 16):
                writer.write(b"x" * (1 << 16))
                await writer.drain()

    await many(8, one, pause=1.0)


async def pipelined(port: int, _: str) -> None:
    """Send 15 MB of GETs on one connection and read the answers."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            writer.write(GET * (15 * MB // len(GET)))
            while await reader.read(1 << 16):
                pass

    await many(1, one, pause=1.0)


async def polite_pipelines(port: int, _: str) -> None:
    """Fill the buffers of 8 connections with GETs, and read the answers."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            while not reader.at_eof():
                writer.write(GET * 1000)
                await reader.read(1 << 20)

    await many(8, one, pause=1.0)


async def slow_bodies(port: int, _: str) -> None:
    """Send a body of 4 MB without a key on 70 connections, one byte per second."""

    async def one() -> None:
        async with connection(port) as (_, writer):
            writer.write(SLOW)
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1.0)

    await many(70, one, pause=1.0)


async def long_texts(_: int, address: str) -> None:
    """Send 12 texts of 4 MiB, longer than the context, at once every 2 s."""
    text = "Some words that anybody might say. " * (4 * MIB)
    text = text[: 4 * MIB - 1024]

    async def one() -> None:
        async with AsyncClient(address, api_key=ATTACKER) as client:
            await client.generate(text, max_tokens=1).complete()

    await many(12, one, pause=2.0)


ATTACKS: dict[str, Callable[[int, str], Awaitable[None]]] = {
    "half_headers": half_headers,
    "endless_headers": endless_headers,
    "pipelined": pipelined,
    "polite_pipelines": polite_pipelines,
    "slow_bodies": slow_bodies,
    "long_texts": long_texts,
}


def cells(attack: str, outcome: Outcome) -> tuple[tuple[object, ...], bool]:
    """Return a row of the table, and whether both marks are met."""
    before, during = percentiles(outcome.before), percentiles(outcome.during)
    moved = during[1] / before[1] - 1
    both = (f"{ms:.1f}" for pair in zip(before, during, strict=True) for ms in pair)
    counts = len(outcome.before), len(outcome.during)
    passed = moved < LATENCY_MARK and outcome.grown < MEMORY_MARK and not outcome.failed
    row = (f"{moved:+.0%}", f"{outcome.grown / MB:+.1f}", len(outcome.failed))
    return (attack, *counts, *both, *row), passed


HEADER = (
    *("attack", "requests before", "during", "p50 before, ms", "during", "p99 before, ms"),
    *("during", "longest before, ms", "during", "p99 moved", "memory, MB", "failed"),
)


async def main(options: argparse.Namespace) -> None:
    """Measure each attack and print a table."""
    rows, good = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for attack in options.attack or ATTACKS:
            async with service(Path(directory), options.tokenizer) as served:
                outcome = await measure(
                    served, attack, seconds=options.seconds, rounds=options.rounds
                )
            row, good[attack] = cells(attack, outcome)
            rows.append(row)
            for reason in sorted(set(outcome.failed)):
                print(f"{attack}, {outcome.failed.count(reason)} times: {reason}")
    print(table(HEADER, rows))
    for attack, passed in good.items():
        verdict(passed, attack)
    sys.exit(not all(good.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=8, help="rounds without and with the attack")
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="default: all")
    parser.add_argument("--tokenizer", help="instead of the byte tokenizer, such as demo")
    asyncio.run(main(parser.parse_args()))
