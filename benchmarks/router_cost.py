"""Measures what a streamed token costs the router, in CPU time of its process.

    python -m benchmarks.router_cost [--streams 256] [--rate 25] [--seconds 20] [--profile]

A paced engine gives every stream so many tokens a second, each its own message
to its own client. CPU time does not depend on what else the machine does, as
time by the clock would. The engine's figure is that of its gRPC side: it
computes nothing. `--profile` runs the router under a profiler, which makes it
slower, and says where the time goes.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fleet import CONTEXT, Node, all_up, make_model, router
from benchmarks.paced_engine import paced_engine
from octavo import AsyncClient
from octavo.common import logging
from octavo.router.settings import RouterSettings

MARK_US = 100.0
PROMPT_TOKENS = 16
CHANNELS = 4
WARM_SECONDS = 2.0
CPUCLOCK_SCHED = 2


@dataclass
class Cost:
    """What was measured.

    Attributes:
        tokens: that clients were sent.
        messages: that these came in.
        router_us: microseconds of the router's CPU time a token.
        engine_us: of the engine's.
    """

    tokens: int
    messages: int
    router_us: float
    engine_us: float


def _cpu_seconds(pid: int | None) -> float:
    """CPU time of a process, to the nanosecond: /proc counts only whole hundredths of a second.

    The clock's number is that of clock_getcpuclockid(3) on Linux.
    """
    assert pid is not None
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


class Streams:
    """Many streams at once, each begun again when it ends."""

    def __init__(self, address: str, streams: int) -> None:
        self._address = address
        self._streams = streams
        self.tokens = self.messages = 0

    async def run(self) -> None:
        """Reads until cancelled."""
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(self._address)) for _ in range(CHANNELS)
            ]
            async with asyncio.TaskGroup() as group:
                for i in range(self._streams):
                    group.create_task(self._stream(clients[i % CHANNELS], i))

    async def _stream(self, client: AsyncClient, number: int) -> None:
        prompt = [number % 256] * PROMPT_TOKENS
        while True:
            most = CONTEXT - PROMPT_TOKENS
            async for delta in client.generate(prompt, max_tokens=most, ignore_eos=True):
                self.tokens += len(delta.text)
                self.messages += 1


async def measure(streams: int, rate: float, seconds: float, profile: str | None = None) -> Cost:
    """Has the router carry the streams for a while.

    Args:
        streams: At once.
        rate: Tokens a second of each.
        seconds: To measure for.
        profile: File for the profiler's figures, which then slow the router.
    """
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        directory = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer = make_model(Path(directory))
        engine = await start(paced_engine(tokenizer, step_seconds=1 / rate, max_num_seqs=streams))
        addresses = [engine.address]
        front = await start(
            Node(partial(_run_profiled, addresses, profile)) if profile else router(addresses)
        )
        await all_up(front, 1)
        load = Streams(front.address, streams)
        task = asyncio.create_task(load.run())
        await asyncio.sleep(WARM_SECONDS)
        nodes = front.pid, engine.pid
        before = [_cpu_seconds(pid) for pid in nodes]
        tokens, messages = load.tokens, load.messages
        await asyncio.sleep(seconds)
        used = [_cpu_seconds(pid) - cpu for pid, cpu in zip(nodes, before, strict=True)]
        tokens, messages = load.tokens - tokens, load.messages - messages
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    router_us, engine_us = (1e6 * cpu / tokens for cpu in used)
    return Cost(tokens, messages, router_us, engine_us)


def _run_profiled(engines: list[str], path: str, port: int, ready: Connection) -> None:
    from octavo.router.server import serve  # noqa: PLC0415 - imported in the process that forks

    logging.configure("console", "error")
    settings = RouterSettings(engine=engines, port=port, metrics_port=0, drain_timeout=0.0)
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(asyncio.run, serve(settings, on_ready=ready.send))
    profiler.dump_stats(path)


def main() -> None:
    """Parses the arguments, measures, and says whether the mark is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=25)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        path = file.name if arguments.profile else None
        cost = asyncio.run(
            measure(arguments.streams, arguments.rate, arguments.seconds, profile=path)
        )
        if path is not None:
            pstats.Stats(path).sort_stats("tottime").print_stats(35)
    print(
        f"{arguments.streams} streams, {cost.tokens} tokens in {cost.messages} messages: "
        f"router {cost.router_us:.1f} us of CPU a token, engine's gRPC side {cost.engine_us:.1f} us"
    )
    passed = cost.router_us < MARK_US
    print(f"{'PASS' if passed else 'FAIL'}: the router's mark is {MARK_US:g} us")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
