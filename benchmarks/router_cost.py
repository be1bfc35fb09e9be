"""Measure the router's CPU time for each streamed token.

    python -m benchmarks.router_cost [--streams 256] [--rate 25] [--seconds 20] [--channels 64]
        [--workers 1]

A paced engine gives every stream `--rate` tokens per second, and the streams use `--channels`
connections to a router of `--workers` processes. CPU time depends less on the machine's other work
than wall time does. The engine computes nothing, so its CPU time is that of gRPC. Clients and
engine share the cores, so the capacity of several workers follows from CPU time: one second,
divided by the busiest process's CPU time per token. The gaps between the messages of a stream show
what the router's coalescing costs its clients.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import psutil

from benchmarks.fixture import CONTEXT, Node, OwnConnection, make_model, router, serving
from benchmarks.paced_engine import paced_engine
from benchmarks.report import verdict
from octavo import AsyncClient

MARK_US = 40.0
PROMPT_TOKENS = 16
CHANNELS = 64
WARM_SECONDS = 2.0
CPUCLOCK_SCHED = 2


@dataclass
class Cost:
    """The cost of streaming.

    Attributes:
        tokens: Tokens that clients received.
        messages: Messages that carried them.
        workers_us: Microseconds of CPU time per token of each router process; the parent of several
            workers is last.
        engine_us: The same for the engine.
        gaps: Seconds between messages of a stream: median and 99th percentile.
    """

    tokens: int
    messages: int
    workers_us: list[float]
    engine_us: float
    gaps: tuple[float, float]

    @property
    def router_us(self) -> float:
        """Microseconds of the router's CPU time per token."""
        return sum(self.workers_us)

    @property
    def carried(self) -> float:
        """Tokens per second when the busiest process fully uses its own core."""
        return 1e6 / max(self.workers_us)


def _cpu_seconds(pid: int) -> float:
    """Return a process' CPU time in nanoseconds; /proc only has hundredths of a second.

    The clock's number is that of clock_getcpuclockid(3) on Linux.
    """
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


class Streams:
    """Many streams at once; another stream replaces each one that ends."""

    def __init__(self) -> None:
        self.tokens = self.messages = 0
        self.gaps: list[float] = []

    async def run(self, address: str, streams: int, channels: int) -> None:
        """Read streams until cancelled."""
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(OwnConnection(address)) for _ in range(channels)
            ]
            async with asyncio.TaskGroup() as group:
                for i in range(streams):
                    group.create_task(self._stream(clients[i % channels], i))

    async def _stream(self, client: AsyncClient, number: int) -> None:
        prompt = [number % 256] * PROMPT_TOKENS
        most = CONTEXT - PROMPT_TOKENS
        while True:
            before: float | None = None
            async for delta in client.generate(prompt, max_tokens=most, ignore_eos=True):
                self.tokens += len(delta.text)
                self.messages += 1
                now = time.monotonic()
                if before is not None:
                    self.gaps.append(now - before)
                before = now


def _processes(front: Node) -> list[int]:
    """Return the router's processes: its workers, then itself."""
    assert front.pid is not None
    children = psutil.Process(front.pid).children()
    workers = [child for child in children if "--multiprocessing-fork" in child.cmdline()]
    return [*sorted(worker.pid for worker in workers), front.pid]


async def measure(
    streams: int, rate: float, seconds: float, channels: int = CHANNELS, workers: int = 1
) -> Cost:
    """Stream through the router and measure the cost.

    Args:
        streams: Concurrent streams.
        rate: Tokens per second of each stream.
        seconds: Duration of the measurement.
        channels: Connections that the streams share.
        workers: Processes of the router.
    """
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = make_model(Path(directory))
        back = paced_engine(tokenizer, step_seconds=1 / rate, max_num_seqs=streams)
        front = router([back.address], workers=workers)
        async with serving([back], front):
            load = Streams()
            task = asyncio.create_task(load.run(front.address, streams, channels))
            await asyncio.sleep(WARM_SECONDS)
            assert back.pid is not None
            pids = [*_processes(front), back.pid]
            before = [_cpu_seconds(pid) for pid in pids]
            tokens, messages = load.tokens, load.messages
            load.gaps.clear()
            await asyncio.sleep(seconds)
            used = [_cpu_seconds(pid) - cpu for pid, cpu in zip(pids, before, strict=True)]
            tokens, messages = load.tokens - tokens, load.messages - messages
            gaps = quantiles(load.gaps, n=100)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    *workers_us, engine_us = (1e6 * cpu / tokens for cpu in used)
    return Cost(tokens, messages, workers_us, engine_us, (gaps[49], gaps[98]))


def main() -> None:
    """Parse the arguments, measure, and print whether the limit is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=25)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--channels", type=int, default=CHANNELS)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    cost = asyncio.run(measure(**vars(options)))
    wanted = options.streams * options.rate * options.seconds
    median, late = (1e3 * gap for gap in cost.gaps)
    print(
        f"{options.streams} streams, {cost.tokens} of {wanted:.0f} tokens in {cost.messages} "
        f"messages: router {cost.router_us:.1f} us of CPU a token, engine's gRPC side "
        f"{cost.engine_us:.1f} us; between messages {median:.0f} ms (median), {late:.0f} ms (p99)"
    )
    if options.workers > 1:
        shares = ", ".join(f"{us:.1f}" for us in cost.workers_us)
        print(f"of each worker and their parent: {shares} us of CPU a token of all")
    print(f"with a core for each process, by these accounts: {cost.carried:.0f} tokens/s")
    sys.exit(not verdict(cost.router_us < MARK_US, f"the router's mark is {MARK_US:g} us"))


if __name__ == "__main__":
    main()
