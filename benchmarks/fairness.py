"""Measure how one tenant's flood affects another, and how two tenants share a full engine.

    python -m benchmarks.fairness [--seconds 150] [--flood 20]

The engine is paced, so its capacity is known and only the router is measured. First each of two
tenants sends a quarter of the engine's capacity; then the second sends `--flood` times as much. The
first one's 99th percentile of time to first token may rise by a quarter. Then both keep the engine
busy with requests of different sizes: each one's weighted tokens may differ from its weight's share
by 5%, for weights 1:1 and 1:2.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fixture import make_model, router, serving, write_tenants
from benchmarks.paced_engine import paced_engine
from benchmarks.report import percentiles, verdict
from octavo import AsyncClient
from octavo.cli.bench.grpc_endpoint import GrpcEndpoint
from octavo.cli.bench.load import Load
from octavo.cli.bench.metrics import OK, Record
from octavo.cli.bench.workload import BenchRequest

PLACES = 32
STEP_SECONDS = 0.025
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 100
CAPACITY = PLACES / STEP_SECONDS / OUTPUT_TOKENS
"""Requests that the engine can serve per second."""
LOAD = 0.25
STREAMS = 48
"""Streams of each tenant while both keep the engine busy."""
SIZES = ((16, 40), (64, 24))
"""Prompt and output tokens of each tenant's requests during that time."""
WARM_SECONDS = 5.0
"""Seconds to ignore: one tenant fills the engine before the router has seen the other."""
TTFT_MARK = 0.25
SHARE_MARK = 0.05


@dataclass
class Served:
    """One tenant's requests: milliseconds to the first token, and requests refused."""

    ttft: list[float]
    refused: int

    @classmethod
    def of(cls, records: list[Record]) -> "Served":
        """Sum up records; ignore times to first token during the first WARM_SECONDS."""
        ttft = [r.ttft for r in records if r.code == OK and r.due > WARM_SECONDS]
        return cls(ttft, sum(r.code != OK for r in records))


@asynccontextmanager
async def service(weights: dict[str, float]) -> AsyncIterator[dict[str, AsyncClient]]:
    """Serve tenants with these weights; yield a client for each."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tenants = write_tenants(directory / "tenants.toml", weights)
        model = make_model(directory / "model")
        back = paced_engine(model, step_seconds=STEP_SECONDS, max_num_seqs=PLACES)
        # Both tenants share a connection, which allows 1024 streams.
        front = router([back.address], tenants=tenants, max_queue_size=512)
        await stack.enter_async_context(serving([back], front, api_key=next(iter(weights))))
        yield {
            name: await stack.enter_async_context(AsyncClient(front.address, api_key=name))
            for name in weights
        }


def send_alone(address: str, key: str, rate: float, seconds: float) -> Served:
    """Send `rate` requests per second at random times from a separate process."""
    draw = random.Random(rate)
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + draw.expovariate(rate))
    requests = [BenchRequest([64] * PROMPT_TOKENS, OUTPUT_TOKENS, ignore_eos=True)] * len(times)

    async def run() -> Served:
        async with AsyncClient(address, api_key=key) as client:
            load = Load(GrpcEndpoint(client), "", salt="")
            # A flood's requests would still wait for a long time.
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await load.send_open(requests, times)
        return Served.of(load.records)

    return asyncio.run(run())


async def flooded(seconds: float, times: float) -> Served:
    """Serve a modest tenant beside one that sends `times` times as much.

    Each is a separate process: in one process they would wait for each other.
    """
    rate = LOAD * CAPACITY
    loop, spawn = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn) as senders:
        async with service({"modest": 1.0, "flood": 1.0}) as clients:
            address = clients["modest"].address
            modest, flood = await asyncio.gather(
                loop.run_in_executor(senders, send_alone, address, "modest", rate, seconds),
                loop.run_in_executor(senders, send_alone, address, "flood", times * rate, seconds),
            )
    typical, slow, _ = percentiles(modest.ttft)
    print(
        f"beside {times:g} times its load: {len(modest.ttft)} served, {modest.refused} refused, "
        f"time to first token {typical:.0f} ms, 99 of 100 at most {slow:.0f} ms; "
        f"the other: {len(flood.ttft)} served, {flood.refused} refused",
        flush=True,
    )
    return modest


async def contended(seconds: float, weights: dict[str, float]) -> dict[str, int]:
    """Return the weighted tokens of two tenants that keep the engine busy.

    Prompt tokens count once and output tokens twice, as in the router.
    """
    async with service(weights) as clients:
        loads = {name: Load(GrpcEndpoint(client), "", salt="") for name, client in clients.items()}
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for load, (prompt, output) in zip(loads.values(), SIZES, strict=True):
                    requests = [BenchRequest([64] * prompt, output, ignore_eos=True)] * 1_000_000
                    group.create_task(load.send_closed(requests, STREAMS))
    return {
        name: sum(
            record.prompt_tokens + 2 * sum(record.message_tokens)
            for record in load.records
            if record.ended > WARM_SECONDS
        )
        for name, load in loads.items()
    }


async def measure(seconds: float, flood: float) -> bool:
    """Measure everything; return whether all limits are met.

    Args:
        seconds: Duration of each flood: a 99th percentile needs hundreds of requests. Each
            measurement of a full engine takes a quarter of it.
        flood: Ratio of the flood's load to the modest tenant's.
    """
    quiet, loud = await flooded(seconds, 1.0), await flooded(seconds, flood)
    moved = percentiles(loud.ttft)[1] / percentiles(quiet.ttft)[1] - 1
    passed = [
        verdict(
            moved < TTFT_MARK and not loud.refused,
            f"the flood moves the time to first token, 99 of 100, by {moved:+.1%}",
        )
    ]
    for weights in ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}):
        tokens = await contended(WARM_SECONDS + seconds / 4, weights)
        by_weight = [tokens[name] / weight for name, weight in weights.items()]
        apart = max(by_weight) / min(by_weight) - 1
        passed.append(
            verdict(
                apart < SHARE_MARK,
                f"weights {weights['a']:g}:{weights['b']:g}: served {tokens['a']}:{tokens['b']}"
                f" weighted tokens, {apart:.1%} apart",
            )
        )
    return all(passed)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--flood", type=float, default=20)
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
