"""Measures what one tenant's flood does to another, and how two share an engine that both fill.

    python -m benchmarks.fairness [--seconds 150] [--flood 20]

The engine is paced, so its capacity is known and the figures are the router's;
tenants are those of a tenants' file, with keys. First a tenant sends a quarter of
what the engine can serve and another as much; then the other sends `--flood`
times that. The first one's time to first token, 99th of 100, may rise by a
quarter. Then both keep the engine busy, with requests of unlike sizes: what each
is served may differ from its weight's share by a twentieth, for weights 1:1 and
1:2.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.fleet import Node, make_model, router
from benchmarks.paced_engine import paced_engine
from octavo import AsyncClient, Delta, Error
from octavo.router.tenants.tenant import hash_key

PLACES = 32
STEP_SECONDS = 0.025
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 100
CAPACITY = PLACES / STEP_SECONDS / OUTPUT_TOKENS
"""Requests that the engine can serve in a second."""
LOAD = 0.25
STREAMS = 48
"""Of each tenant, where both keep the engine busy."""
WARM_SECONDS = 5.0
"""An engine is filled by one tenant before anybody knows that there is another."""
TTFT_MARK = 0.25
SHARE_MARK = 0.05


@dataclass
class Served:
    """What one tenant had.

    Attributes:
        ttft: seconds to each request's first token.
        since: when counting begins, by the monotonic clock.
        refused: requests.
        tokens: of prompts and outputs, weighed one and two as the router does.
    """

    ttft: list[float] = field(default_factory=list)
    since: float = field(default_factory=lambda: time.monotonic() + WARM_SECONDS)
    refused: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Counts tokens that came."""
        self.tokens += tokens * (time.monotonic() > self.since)


@asynccontextmanager
async def service(weights: dict[str, float]) -> AsyncIterator[dict[str, AsyncClient]]:
    """Serves tenants of these weights; gives a client to each."""
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = directory / "tenants.toml"
        file.write_text(
            "".join(
                f'[{name}]\nweight = {weight}\nkeys = ["{hash_key(name)}"]\n'
                for name, weight in weights.items()
            )
        )
        model = make_model(directory / "model")
        back = await start(paced_engine(model, step_seconds=STEP_SECONDS, max_num_seqs=PLACES))
        # Both tenants share a connection, which has 1024 streams at most.
        front = await start(router([back.address], tenants=file, max_queue_size=512))
        clients = {
            name: await stack.enter_async_context(AsyncClient(front.address, api_key=name))
            for name in weights
        }
        for client in clients.values():
            while not await client.list_models():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield clients


async def ask(client: AsyncClient, served: Served, prompt: int, output: int) -> None:
    """Has a request served, or refused."""
    began = time.monotonic()
    stream = client.generate([64] * prompt, max_tokens=output, ignore_eos=True, token_ids=True)
    first = True
    try:
        async for event in stream.events():
            if not isinstance(event, Delta):
                continue
            if first:
                first = False
                if began > served.since:
                    served.ttft.append(time.monotonic() - began)
                served.add(prompt)
            served.add(2 * len(event.token_ids))
    except Error:
        served.refused += 1


async def send(client: AsyncClient, served: Served, rate: float, seconds: float) -> None:
    """Sends requests at random times, `rate` a second, whatever became of those before."""
    draw = random.Random(rate)
    due = time.monotonic()
    end = due + seconds
    async with asyncio.TaskGroup() as group:
        tasks = []
        while (due := due + draw.expovariate(rate)) < end:
            await asyncio.sleep(due - time.monotonic())
            tasks.append(group.create_task(ask(client, served, PROMPT_TOKENS, OUTPUT_TOKENS)))
        for task in tasks:
            task.cancel()  # those of a flood would still wait for long


def send_alone(address: str, key: str, rate: float, seconds: float) -> Served:
    """Sends requests from a process of its own."""

    async def run() -> Served:
        served = Served()
        async with AsyncClient(address, api_key=key) as client:
            await send(client, served, rate, seconds)
        return served

    return asyncio.run(run())


async def flooded(seconds: float, times: float) -> Served:
    """Returns what a modest tenant has beside one that sends so many times as much.

    Each is a process, as tenants are: else one would wait for its turn to receive.
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
    print(
        f"beside {times:g} times its load: {len(modest.ttft)} served, {modest.refused} refused, "
        f"time to first token {1e3 * median(modest.ttft):.0f} ms, 99 of 100 at most "
        f"{1e3 * slowest(modest):.0f} ms; the other: {len(flood.ttft)} served, "
        f"{flood.refused} refused",
        flush=True,
    )
    return modest


def slowest(served: Served) -> float:
    """Returns the time to first token that 99 of 100 requests keep to."""
    return quantiles(served.ttft, n=100, method="inclusive")[98]


async def contended(seconds: float, weights: dict[str, float]) -> dict[str, Served]:
    """Returns what tenants have that both keep the engine busy, one with longer requests."""
    shares: dict[str, Served] = {}
    sizes = dict(zip(weights, [(16, 40), (64, 24)], strict=True))

    async def stream(client: AsyncClient, name: str) -> None:
        while True:
            await ask(client, shares[name], *sizes[name])

    async with service(weights) as clients:
        shares |= {name: Served() for name in weights}
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for name, client in clients.items():
                    for _ in range(STREAMS):
                        group.create_task(stream(client, name))
    return shares


def verdict(passed: bool, what: str) -> bool:
    """Prints how one mark was met."""
    print(f"{'PASS' if passed else 'FAIL'}: {what}", flush=True)
    return passed


async def measure(seconds: float, flood: float) -> bool:
    """Measures everything; returns whether every mark was met.

    Args:
        seconds: that the floods take, for hundreds of requests make a 99th of 100; the shares
            of a full engine take a quarter of that, each.
        flood: times the modest tenant's load.
    """
    quiet, loud = await flooded(seconds, 1.0), await flooded(seconds, flood)
    moved = slowest(loud) / slowest(quiet) - 1
    passed = [
        verdict(
            moved < TTFT_MARK and not loud.refused,
            f"the flood moves the time to first token, 99 of 100, by {moved:+.1%}",
        )
    ]
    for weights in ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}):
        shares = await contended(WARM_SECONDS + seconds / 4, weights)
        by_weight = [shares[name].tokens / weight for name, weight in weights.items()]
        apart = max(by_weight) / min(by_weight) - 1
        passed.append(
            verdict(
                apart < SHARE_MARK,
                f"weights {weights['a']:g}:{weights['b']:g}: served "
                f"{shares['a'].tokens}:{shares['b'].tokens} weighted tokens, {apart:.1%} apart",
            )
        )
    return all(passed)


def main() -> None:
    """Parses the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--flood", type=float, default=20)
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
