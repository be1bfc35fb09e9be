"""Measure how clients that never read affect other clients and the router's memory.

    python -m benchmarks.slow_readers [--others 50] [--tokens 400] [--step 0.01]

One client reads a stream at full speed: alone, beside other fast readers, and beside as many
clients that send a request, keep their connection open and read nothing. A paced engine gives every
stream one token per step, so only the router is measured. The router holds up to
`--max-unread-tokens` tokens for a client, then cancels the request.
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hyperframe.frame import SettingsFrame

from benchmarks.fixture import CONTEXT, Node, make_model, router, serving
from benchmarks.fuzz.calls import GENERATION
from benchmarks.fuzz.http2 import PREFACE, Wire
from benchmarks.paced_engine import paced_engine
from benchmarks.report import percentiles, table
from octavo import AsyncClient
from octavo.cli.bench.grpc_endpoint import GrpcEndpoint
from octavo.cli.bench.load import Load
from octavo.cli.bench.workload import BenchRequest
from octavo.v1 import generation_pb2

MIB = 1 << 20
LONG = CONTEXT - 100
"""Output tokens of the others' requests: more than arrive during the measurement."""
MAX_UNREAD = 128


@dataclass(frozen=True)
class Outcome:
    """The effect of one kind of other clients.

    Attributes:
        gaps: Seconds between messages to the reading client.
        tokens: Tokens that the client read.
        grown: Maximum growth of the router's memory in bytes.
        running: The others' requests still running on the engine at the end.
    """

    gaps: list[float]
    tokens: int
    grown: int
    running: int


@asynccontextmanager
async def service(directory: Path, *, step_seconds: float) -> AsyncIterator[Node]:
    """Serve a paced engine; yield the router."""
    back = paced_engine(make_model(directory), step_seconds=step_seconds, max_num_seqs=512)
    front = router([back.address], max_unread_tokens=MAX_UNREAD)
    async with serving([back], front):
        yield front


async def alone(_: Node, __: int) -> None:
    """Do nothing."""


async def beside_readers(front: Node, others: int) -> None:
    """Read long streams."""

    async def read() -> None:
        async with AsyncClient(front.address) as client:
            async for _ in client.generate("hello", max_tokens=LONG):
                pass

    await asyncio.gather(*(read() for _ in range(others)))


async def beside_sleepers(front: Node, others: int) -> None:
    """Request long streams with closed windows and never read."""
    request = generation_pb2.GenerateRequest(text="hello")
    request.stop.max_tokens = LONG
    wires = []
    for _ in range(others):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined] - a socket has it
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


async def measure(front: Node, company: str, *, others: int, tokens: int) -> Outcome:
    """Read one stream to its end beside other clients."""
    before = most = front.rss()
    beside = asyncio.create_task(COMPANY[company](front, others))
    async with AsyncClient(front.address) as client:
        load = Load(GrpcEndpoint(client), "", salt="")
        request = BenchRequest("hello", tokens, ignore_eos=True)
        reading = asyncio.create_task(load.send_closed([request], 1))
        while not reading.done():
            most = max(most, front.rss())
            await asyncio.sleep(0.05)
        await reading
        await asyncio.sleep(1.5)  # until the engine reports that it is idle, if it is
        (model,) = await client.list_models()
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    (record,) = load.records
    return Outcome(record.itl.tolist(), record.output_tokens, most - before, model.running)


async def main(options: argparse.Namespace) -> None:
    """Measure each kind of other clients and print a table."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        async with service(Path(directory), step_seconds=options.step) as front:
            await measure(front, "alone", others=0, tokens=20)  # warm-up
            for name in COMPANY:
                outcome = await measure(front, name, others=options.others, tokens=options.tokens)
                times = (f"{figure:.1f}" for figure in percentiles(outcome.gaps))
                grown = f"+{outcome.grown / MIB:.1f}"
                rows.append((name, *times, outcome.tokens, grown, outcome.running))
    header = ("", "p50, ms", "p99, ms", "longest, ms", "tokens", "memory, MiB", "others running")
    print(table(header, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--others", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step", type=float, default=0.01, help="seconds")
    asyncio.run(main(parser.parse_args()))
