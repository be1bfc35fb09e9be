"""Do clients that never read cost those that do, or the router's memory?

    python -m benchmarks.slow_readers [--others 50] [--tokens 400] [--step 0.01]

One client reads a stream as fast as it comes: alone, beside others that read
theirs as fast, and beside as many that ask, keep their connection open and read
nothing at all. A paced engine gives every stream a token a step, so what is
measured is the router. What it may hold for a client is `--max-unread-tokens`
tokens, and then it cancels the request.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import psutil
from hyperframe.frame import SettingsFrame

from benchmarks.fleet import CONTEXT, Node, all_up, make_model, router
from benchmarks.fuzz.calls import GENERATION
from benchmarks.fuzz.http2 import PREFACE, Wire
from benchmarks.paced_engine import paced_engine
from octavo import AsyncClient
from octavo.v1 import generation_pb2

MIB = 1 << 20
LONG = CONTEXT - 100
"""Tokens that the others ask for: more than come while they are watched."""
MAX_UNREAD = 128


@dataclass(frozen=True)
class Outcome:
    """What one way of being beside others came to.

    Attributes:
        gaps: seconds from message to message of the client that reads.
        tokens: that it got.
        grown: bytes by which the router's memory grew, at most.
        running: requests of the others that the engine still works on at the end.
    """

    gaps: list[float]
    tokens: int
    grown: int
    running: int


@dataclass(frozen=True)
class Stand:
    """A router in front of a paced engine."""

    router: Node

    def rss(self) -> int:
        """Bytes of the router's memory."""
        return int(psutil.Process(self.router.pid).memory_info().rss)


@asynccontextmanager
async def stand(directory: Path, *, step_seconds: float) -> AsyncIterator[Stand]:
    """Starts both."""
    engine = paced_engine(make_model(directory), step_seconds=step_seconds, max_num_seqs=512)
    front = router([engine.address], max_unread_tokens=MAX_UNREAD)
    async with AsyncExitStack() as stack:
        for node in (engine, front):
            stack.push_async_callback(node.close)
            await node.start()
        await all_up(front, 1)
        yield Stand(front)


async def alone(_: Stand, __: int) -> None:
    """Nobody else."""


async def beside_readers(stand: Stand, others: int) -> None:
    """Others that read."""

    async def read() -> None:
        async with AsyncClient(stand.router.address) as client:
            async for _ in client.generate("hello", max_tokens=LONG):
                pass

    await asyncio.gather(*(read() for _ in range(others)))


async def beside_sleepers(stand: Stand, others: int) -> None:
    """Others that never read, and whose windows are closed."""
    request = generation_pb2.GenerateRequest(text="hello")
    request.stop.max_tokens = LONG
    wires = []
    for _ in range(others):
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.router.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined] - of a socket it is one
        wire = Wire(reader, writer, f"{GENERATION}Generate", request.SerializeToString())
        wire.send(PREFACE, SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}))
        wire.call(1)
        wires.append(wire)
    try:
        await asyncio.Event().wait()
    finally:
        for wire in wires:
            wire.close(rudely=True)


COMPANY = {"alone": alone, "beside readers": beside_readers, "beside sleepers": beside_sleepers}


async def measure(stand: Stand, company: str, *, others: int, tokens: int) -> Outcome:
    """Reads one stream to its end in some company."""
    before = most = stand.rss()
    beside = asyncio.create_task(COMPANY[company](stand, others))
    gaps, got = [], 0
    async with AsyncClient(stand.router.address) as client:
        last = None
        async for delta in client.generate("hello", max_tokens=tokens, token_ids=True):
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last, got, most = now, got + len(delta.token_ids), max(most, stand.rss())
        await asyncio.sleep(1.5)  # until the engine has told of an idle moment, if it has one
        (model,) = await client.list_models()
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    return Outcome(gaps, got, most - before, model.running)


async def main(options: argparse.Namespace) -> None:
    """Measures each company and prints a table."""
    print("| | p50, ms | p99, ms | longest, ms | tokens | memory, MiB | others running |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        async with stand(Path(directory), step_seconds=options.step) as servers:
            await measure(servers, "alone", others=0, tokens=20)  # so that all is loaded
            for name in COMPANY:
                outcome = await measure(servers, name, others=options.others, tokens=options.tokens)
                ms = [1000 * gap for gap in outcome.gaps]
                figures = (median(ms), quantiles(ms, n=100)[98], max(ms))
                print(
                    f"| {name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |"
                    f" {outcome.tokens} | +{outcome.grown / MIB:.1f} | {outcome.running} |"
                )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step", type=float, default=0.01, help="seconds")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(_options()))
