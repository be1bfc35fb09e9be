"""Does a client that attacks the router cost its neighbour time, or the router memory?

    python -m benchmarks.attacks [--seconds 4] [--rounds 8] [--attack NAME ...]

A tenant with a key asks for short completions over HTTP, each on a connection of its own,
from the same address as the attacker, and in turns while nobody attacks and while one
does. The engine is paced, so what is measured is the router; the attacker is a process of
its own at the lowest priority, and its rates are bounded. For each attack two lines say
whether

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
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

import psutil

from benchmarks.fleet import Node, make_model, router
from benchmarks.paced_engine import paced_engine
from octavo import AsyncClient, Error
from octavo.common.ports import free_port
from octavo.router.tenants.tenant import hash_key

MB = 10**6
MIB = 1 << 20
STEP_SECONDS = 0.01
MAX_CONNECTIONS = 60
NEIGHBOURS = 2
"""Requests of the neighbour that are in progress."""
PAUSE_SECONDS = 0.01
TIMEOUT_SECONDS = 120.0
COOL_SECONDS = 0.5
LATENCY_MARK = 0.25
MEMORY_MARK = 100 * MB
KEYS = {"neighbour": "neighbour-key", "attacker": "attacker-key"}

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "
SLOW = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"


@dataclass
class Outcome:
    """What the neighbour and the router went through.

    Attributes:
        before: seconds of each of the neighbour's requests while nobody attacked.
        during: the same during the attack.
        failed: the neighbour's requests that were not served.
        grown: bytes by which the router's memory grew, at most.
    """

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    grown: int = 0


@dataclass(frozen=True)
class Stand:
    """A router in front of a paced engine.

    Attributes:
        router: its process.
        http_port: where it speaks HTTP.
    """

    router: Node
    http_port: int

    def rss(self) -> int:
        """Bytes of the router's memory."""
        return int(psutil.Process(self.router.pid).memory_info().rss)


@asynccontextmanager
async def stand(directory: Path, tokenizer: str | None = None) -> AsyncIterator[Stand]:
    """Starts both; the tokenizer is one of bytes unless another is named."""
    tenants = directory / "tenants.toml"
    tenants.write_text("".join(f'[{n}]\nkeys = ["{hash_key(k)}"]\n' for n, k in KEYS.items()))
    source = tokenizer or make_model(directory)
    engine = paced_engine(source, step_seconds=STEP_SECONDS, max_num_seqs=64)
    port = free_port()
    limits = {"max_connections": MAX_CONNECTIONS, "tenants": tenants, "http_port": port}
    front = router([engine.address], **limits)
    async with AsyncExitStack() as stack:
        for node in (engine, front):
            stack.push_async_callback(node.close)
            await node.start()
        async with AsyncClient(front.address, api_key=KEYS["neighbour"]) as client:
            while not await client.list_models():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield Stand(front, port)


async def ask(port: int) -> float:
    """Has one short completion made on a new connection; returns the seconds it took.

    Raises:
        OSError: The router closed the connection.
        ValueError: It did not answer 200.
    """
    body = json.dumps({"prompt": "Say something.", "max_tokens": 2}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEYS['neighbour']}\r\nConnection: close\r\n"
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


async def neighbour(stand: Stand, seconds: float, took: list[float], failed: list[str]) -> None:
    """Asks again and again for a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                took.append(await ask(stand.http_port))
        except (OSError, ValueError, TimeoutError) as error:
            failed.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(PAUSE_SECONDS)


async def measure(stand: Stand, attack: str, *, seconds: float, rounds: int) -> Outcome:
    """Measures by turns without and with an attack."""
    outcome = Outcome()
    warm: list[float] = []
    await _phase(stand, min(seconds, 2.0), warm, outcome)
    start = stand.rss()
    async with attacker(attack, stand) as switch:
        for _ in range(rounds):
            await asyncio.sleep(COOL_SECONDS)
            await _phase(stand, seconds, outcome.before, outcome)
            await switch(True)
            grown = await _phase(stand, seconds, outcome.during, outcome)
            outcome.grown = max(outcome.grown, grown - start)
            await switch(False)
    return outcome


async def _phase(stand: Stand, seconds: float, took: list[float], outcome: Outcome) -> int:
    """Has the neighbour ask; returns the router's most memory meanwhile."""
    tasks = [
        asyncio.create_task(neighbour(stand, seconds, took, outcome.failed))
        for _ in range(NEIGHBOURS)
    ]
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, stand.rss())
        await asyncio.sleep(0.05)
    return most


@asynccontextmanager
async def attacker(attack: str, stand: Stand) -> AsyncIterator[Callable[[bool], Awaitable[None]]]:
    """Starts a process that attacks when switched on; gives the switch."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_attacker, args=(attack, stand.http_port, stand.router.address, theirs), daemon=True
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
    """Runs `count` of something; each begins again a while after its end."""

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
    """Opens a connection, and closes it rudely."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def half_headers(port: int, _: str) -> None:
    """70 connections send half a header and wait."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            writer.write(HALF)
            await reader.read()

    await many(70, one, pause=1.0)


async def endless_headers(port: int, _: str) -> None:
    """8 connections send a header of up to 50 MB each."""

    async def one() -> None:
        async with connection(port) as (_, writer):
            writer.write(HALF)
            for _ in range(50 * MB >> 16):
                writer.write(b"x" * (1 << 16))
                await writer.drain()

    await many(8, one, pause=1.0)


async def pipelined(port: int, _: str) -> None:
    """One connection sends 15 MB of GETs and reads what is answered."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            writer.write(GET * (15 * MB // len(GET)))
            while await reader.read(1 << 16):
                pass

    await many(1, one, pause=1.0)


async def polite_pipelines(port: int, _: str) -> None:
    """8 connections send as many GETs as are kept for later, and read what is answered."""

    async def one() -> None:
        async with connection(port) as (reader, writer):
            while not reader.at_eof():
                writer.write(GET * 1000)
                await reader.read(1 << 20)

    await many(8, one, pause=1.0)


async def slow_bodies(port: int, _: str) -> None:
    """70 connections without a key send a body of 4 MB, a byte every second."""

    async def one() -> None:
        async with connection(port) as (_, writer):
            writer.write(SLOW)
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1.0)

    await many(70, one, pause=1.0)


async def long_texts(_: int, address: str) -> None:
    """A tenant sends 12 texts of 4 MiB at once, every 2 s, that fit no context."""
    text = "Some words that anybody might say. " * (4 * MIB)
    text = text[: 4 * MIB - 1024]

    async def one() -> None:
        async with AsyncClient(address, api_key=KEYS["attacker"]) as client:
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


def report(attack: str, outcome: Outcome) -> bool:
    """Prints a row and two verdicts; says whether both are good."""
    before, during = (
        (median(took), quantiles(took, n=100)[98], max(took))
        for took in (outcome.before, outcome.during)
    )
    moved = during[1] / before[1] - 1
    both = " | ".join(
        f"{1000 * b:.1f} | {1000 * d:.1f}" for b, d in zip(before, during, strict=True)
    )
    print(
        f"| {attack} | {len(outcome.before)} | {len(outcome.during)} | {both} | {moved:+.0%} |"
        f" {outcome.grown / MB:+.1f} | {len(outcome.failed)} |",
        flush=True,
    )
    return moved < LATENCY_MARK and outcome.grown < MEMORY_MARK and not outcome.failed


async def main(options: argparse.Namespace) -> None:
    """Measures each attack and prints a table."""
    print(
        "| attack | requests before | during | p50 before, ms | during | p99 before, ms | during |"
        " longest before, ms | during | p99 moved | memory, MB | failed |"
    )
    print("| --- |" + " --- |" * 11)
    good = {}
    with tempfile.TemporaryDirectory() as directory:
        for attack in options.attack or ATTACKS:
            async with stand(Path(directory), options.tokenizer) as servers:
                outcome = await measure(
                    servers, attack, seconds=options.seconds, rounds=options.rounds
                )
            good[attack] = report(attack, outcome)
            for reason in sorted(set(outcome.failed)):
                print(f"      {outcome.failed.count(reason)} times: {reason}")
    for attack, passed in good.items():
        print(f"{'PASS' if passed else 'FAIL'}  {attack}")
    sys.exit(not all(good.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns without and with the attack")
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="default: all")
    parser.add_argument("--tokenizer", help="in place of one of bytes; such as demo")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(_options()))
