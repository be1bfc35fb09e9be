"""Move requests between engines: by copies of their blocks, and by computing them again.

    python -m benchmarks.kv_transfer [--dtype float32] [--lengths 500 2000 7500] [--repeats 3]
    python -m benchmarks.kv_transfer --cuts 40
    python -m benchmarks.kv_transfer --streams 6 [--long 2] [--seconds 30] [--dtype bfloat16]

Two engines of the demo model have a core each (taskset). A request has begun on one when the router
removes that engine, and goes on at the other. Printed is the time from the removal to the next
token: with copies, without (no swap space), and with copies over a wire that is slower than
computing. Outputs must be those of a run without removals.

With --cuts, the wire between the engines is cut at a random byte of each copy instead.

With --streams, so many clients send short prompts in turn and read long answers, beside clients
that send prompts of 2,000 tokens: to two engines of role both, then to one of each role. Printed
are the gaps between the streams' tokens, the time to the long prompts' first tokens, and the tokens
per second. Outputs must be the same.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

import grpc.aio

from benchmarks.fixture import Node, all_up, router
from benchmarks.metrics import Metrics
from octavo import AsyncClient, Delta
from octavo.common.ports import free_port
from octavo.v1 import admin_pb2, admin_pb2_grpc

OUTPUT = 24
BEGUN = 4
"""Tokens after which a request is moved."""
PIECE = 1 << 16


class Wire:
    """A TCP proxy with a limited speed, which can cut connections.

    Attributes:
        address: Its HOST:PORT.
        bytes_per_second: The speed of what the server sends; 0 is not limited.
        cut: Number of sent bytes after which a connection ends; None does not end it.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.bytes_per_second = 0.0
        self.cut: int | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        for source, sink, own in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.create_task(self._carry(source, sink, limited=own))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, limited: bool
    ) -> None:
        carried, cut = 0, self.cut if limited else None
        try:
            while data := await source.read(PIECE):
                left = len(data) if cut is None else cut - carried
                sink.write(data[:left])
                await sink.drain()
                if left < len(data):
                    break
                carried += len(data)
                if limited and self.bytes_per_second:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
        except OSError:
            pass
        sink.transport.abort()


@dataclass
class Moved:
    """A request's output, and the time that its move took."""

    tokens: list[int]
    seconds: float


@dataclass
class Pair:
    """Two engines, the wires to them, their router and a client."""

    wires: list[Wire]
    metrics_ports: list[int]
    client: AsyncClient
    admin: "admin_pb2_grpc.AdminServiceAsyncStub"
    front: Node
    salts: Iterator[int] = field(default_factory=itertools.count)

    async def ask(self, prompt: list[int], *, move: bool, cut: int | None = None) -> Moved:
        """Send a request that shares no prefix; remove its engine once it has begun if `move`."""
        stream = self.client.generate(
            prompt,
            max_tokens=OUTPUT,
            temperature=0,
            ignore_eos=True,
            token_ids=True,
            cache_salt=str(next(self.salts)),
        )
        tokens: list[int] = []
        removed, seconds, address = 0.0, 0.0, ""
        async for event in stream.events():
            if not isinstance(event, Delta):
                continue
            if removed and not seconds:
                seconds = time.perf_counter() - removed
            tokens += event.token_ids
            if move and not removed and len(tokens) >= BEGUN:
                address = await self._busy()
                for wire in self.wires:
                    wire.cut = cut
                removed = time.perf_counter()
                await self.admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=address))
        if address:
            for wire in self.wires:
                wire.cut = None
            await self.admin.AddEngine(admin_pb2.AddEngineRequest(address=address))
            await all_up(self.front, 2)
        return Moved(tokens, seconds)

    async def _busy(self) -> str:
        engines = (await self.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
        return next(engine.address for engine in engines if engine.sequences)

    def copied(self) -> float:
        """Return the number of copied blocks."""
        name = "octavo_engine_peer_blocks_total"
        return sum(Metrics(port).value(name, what="read") for port in self.metrics_ports)


def start_engine(core: int, port: int, metrics_port: int, *flags: str) -> subprocess.Popen[bytes]:
    """Start an engine on one core."""
    ports = "--port", str(port), "--metrics-port", str(metrics_port)
    command = "taskset", "-c", str(core), sys.executable, "-m", "octavo", "engine"
    common = "--model", "demo", "--cache-memory", "1", "--log-level", "error"
    return subprocess.Popen([*command, *common, *ports, *flags])


@asynccontextmanager
async def pair(
    dtype: str, *flags: str, roles: tuple[str, str] = ("both", "both")
) -> AsyncIterator[Pair]:
    """Start two engines, a core each, and their router."""
    async with AsyncExitStack() as stack:
        wires, metrics_ports = [], []
        for core, role in enumerate(roles):
            port, metrics_port = free_port(), free_port()
            metrics_ports.append(metrics_port)
            process = start_engine(
                core, port, metrics_port, "--dtype", dtype, "--role", role, *flags
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wires.append(await stack.enter_async_context(Wire(port)))
        admin_port = free_port()
        front = router((wire.address for wire in wires), admin_port=admin_port)
        stack.push_async_callback(front.close)
        await front.start()
        await all_up(front, 2)
        client = await stack.enter_async_context(AsyncClient(front.address))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{admin_port}")
        await stack.enter_async_context(channel)
        stub: admin_pb2_grpc.AdminServiceAsyncStub
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[assignment]
        yield Pair(wires, metrics_ports, client, stub, front)


def prompts(lengths: list[int], repeats: int) -> list[list[int]]:
    """Return random prompts."""
    draw = random.Random(0)
    return [
        [draw.randrange(1000, 40000) for _ in range(n)] for n in lengths for _ in range(repeats)
    ]


async def warm_up(two: Pair) -> None:
    """Have both engines measure their prefill, and copies."""
    draw = random.Random(1)
    for _ in range(3):
        await two.ask([draw.randrange(1000, 40000) for _ in range(1000)], move=True)


async def compare(dtype: str, lengths: list[int], repeats: int) -> bool:
    """Print the times of moves; return whether all outputs were right."""
    asked = prompts(lengths, repeats)
    right = True
    expected: list[list[int]] = []
    modes = {"computed": ("--swap-space", "0"), "copied": ("--swap-space", "1")}
    for mode, flags in modes.items():
        async with pair(dtype, *flags) as two:
            await warm_up(two)
            if not expected:
                expected = [(await two.ask(prompt, move=False)).tokens for prompt in asked]
            for slow in (0.0,) if mode == "computed" else (0.0, 2e6):
                for wire in two.wires:
                    wire.bytes_per_second = slow
                for number, length in enumerate(lengths):
                    own = range(number * repeats, (number + 1) * repeats)
                    before = two.copied()
                    moved = [await two.ask(asked[i], move=True) for i in own]
                    blocks = two.copied() - before
                    times = ", ".join(f"{each.seconds:.2f}" for each in moved)
                    median = statistics.median(each.seconds for each in moved)
                    same = [each.tokens == expected[i] for i, each in zip(own, moved, strict=True)]
                    right &= all(same)
                    print(
                        f"{length:6} tokens {mode:9} {'2 MB/s' if slow else '':6} median "
                        f"{median:6.2f} s ({times}), {blocks:5.0f} blocks copied, "
                        f"{'identical' if all(same) else 'DIFFERENT'}",
                        flush=True,
                    )
    return right


async def cut_copies(dtype: str, cuts: int) -> bool:
    """Cut copies at random bytes; return whether all requests completed with the right output."""
    draw = random.Random(2)
    async with pair(dtype, "--swap-space", "1") as two:
        await warm_up(two)
        found = []
        for prompt in prompts([600], cuts):
            before = two.copied()
            cut = draw.randrange(30_000_000)
            moved = await two.ask(prompt, move=True, cut=cut)
            expected = await two.ask(prompt, move=False)
            found.append((moved.tokens == expected.tokens, two.copied() - before))
        same = sum(same for same, _ in found)
        partly = sum(0 < blocks < 37 for _, blocks in found)
        print(f"{cuts} copies cut: {same} identical; {partly} had copied a part of the blocks")
        return same == cuts


@dataclass
class Mix:
    """What clients of streams and of long prompts saw, from `since` on."""

    since: float
    gaps: list[float] = field(default_factory=list)
    long_first: list[float] = field(default_factory=list)
    stream_tokens: int = 0
    long_tokens: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)

    async def send(self, two: Pair, number: int, *, long: bool) -> None:
        """Send one request; `number` chooses its prompt."""
        draw = random.Random(number)
        prompt = [draw.randrange(1000, 40000) for _ in range(2000 if long else 20)]
        began = last = time.perf_counter()
        tokens: list[int] = []
        length = 32 if long else 200
        stream = two.client.generate(
            prompt, max_tokens=length, temperature=0, ignore_eos=True, token_ids=True
        )
        async for event in stream.events():
            if not isinstance(event, Delta):
                continue
            now = time.perf_counter()
            if now >= self.since:
                if not long and tokens:
                    self.gaps += [(now - last) / len(event.token_ids)] * len(event.token_ids)
                if long and not tokens:
                    self.long_first.append(now - began)
                    self.long_tokens += len(prompt)
                if long:
                    self.long_tokens += len(event.token_ids)
                else:
                    self.stream_tokens += len(event.token_ids)
            tokens += event.token_ids
            last = now
        self.outputs[number] = tokens


async def mix(two: Pair, streams: int, long: int, seconds: float) -> Mix:
    """Have clients send request after request; return what they saw after a third of the time."""
    began = time.perf_counter()
    seen = Mix(began + seconds / 3)

    async def client(first: int, *, long: bool) -> None:
        for number in itertools.count(first):
            if time.perf_counter() > began + seconds:
                return
            await seen.send(two, number, long=long)

    clients = [client(1000 * (1 + i), long=False) for i in range(streams)]
    clients += [client(1000 * (101 + i), long=True) for i in range(long)]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*clients)
    return seen


async def compare_roles(dtype: str, streams: int, long: int, seconds: float) -> bool:
    """Print what clients see with two roles and with one; return whether outputs are the same."""
    outputs: dict[int, list[int]] = {}
    right = True
    for roles in (("both", "both"), ("prefill", "decode")):
        async with pair(dtype, "--swap-space", "1", roles=roles) as two:
            seen = await mix(two, streams, long, seconds)
        span = seconds * 2 / 3
        gaps = statistics.quantiles(seen.gaps or [math.nan] * 2, n=100)
        shared = outputs.keys() & seen.outputs.keys()
        right &= all(outputs[number] == seen.outputs[number] for number in shared)
        outputs = seen.outputs
        print(
            f"{'+'.join(roles):15} gaps p50 {gaps[49] * 1e3:.1f} p99 {gaps[98] * 1e3:.1f} ms; "
            f"first token of long prompts {statistics.median(seen.long_first):.2f} s; "
            f"{seen.stream_tokens / span:.0f} stream tokens/s, {seen.long_tokens / span:.0f} of "
            f"long requests; {len(shared)} outputs compared",
            flush=True,
        )
    print("identical" if right else "DIFFERENT")
    return right


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 7500])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--long", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    if options.streams is not None:
        work = compare_roles(options.dtype, options.streams, options.long, options.seconds)
    elif options.cuts:
        work = cut_copies(options.dtype, options.cuts)
    else:
        work = compare(options.dtype, options.lengths, options.repeats)
    sys.exit(not asyncio.run(work))


if __name__ == "__main__":
    main()
