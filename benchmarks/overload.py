"""Sends several times what an engine can serve, with deadlines, and sees what is still served.

    python -m benchmarks.overload [--seconds 60] [--load 3] [--deadline 4] [--model M | --paced]

First as many streams as keep the engine busy ask again and again, with no
deadline: what comes of that is the peak. Then requests come at random times,
`--load` times as many as that, whatever became of those before, each with a
deadline of so many times what one took at the peak; then the peak once more, as
other work on the machine may have changed it. Router and engine are processes
of their own. The model is tiny and real: its tokens are so many that on few cores
router and clients take what the engine needs. With `--model` it is another one, such
as `demo`, compiled, on all cores. With `--paced` the engine's steps take a fixed time instead,
so that its capacity does not hang on what else the machine does, and the figures are
the router's. The lines say whether

    goodput     tokens of requests complete by their deadlines: within 5% of the peak
    refusals    are fast, 99 of 100 within 50 ms, and each says when to come back
    misses      no request that an engine began is late by more than one step
    memory      of router and engine does not grow
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles

import numpy as np
import psutil

from benchmarks.fleet import EOS, Node, all_up, engine, make_model, router
from benchmarks.paced_engine import paced_engine
from octavo import AsyncClient, Delta, Error
from octavo.client import Accepted
from octavo.client.errors import DeadlineExceededError, ResourceExhaustedError

PLACES = 16
PACED_STEP = 0.01
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 128
GOODPUT_MARK = 0.95
REFUSAL_MARK = 0.05
GROWTH_MARK = 0.02
"""Share of its memory that a process may grow by in a minute."""


@dataclass
class Outcome:
    """What became of requests.

    Attributes:
        served: when each began and ended that was complete in time.
        tokens: that came of all.
        refused: seconds until each heard so that was refused.
        dumb: refusals that did not say when to come back.
        short: tokens that each had still to get at its deadline, of those begun.
        unbegun: requests whose deadline passed before an engine began.
        failures: what became of the others.
    """

    served: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    refused: list[float] = field(default_factory=list)
    dumb: int = 0
    short: list[int] = field(default_factory=list)
    unbegun: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """A process's resident memory in the course of time."""

    process: psutil.Process
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self) -> None:
        """Notes how much it is now."""
        self.samples.append((time.monotonic(), self.process.memory_info().rss))

    @property
    def growth(self) -> float:
        """Bytes a second, by a line through the later three quarters of the samples."""
        times, sizes = np.array(self.samples[len(self.samples) // 4 :], dtype=float).T
        return float(np.polyfit(times - times[0], sizes, 1)[0])

    @property
    def size(self) -> float:
        """Bytes, on average."""
        return mean(size for _, size in self.samples)


async def ask(client: AsyncClient, number: int, outcome: Outcome, timeout: float | None) -> None:
    """Has one request served, or not."""
    began = time.monotonic()
    prompt = random.Random(number).choices(range(EOS), k=PROMPT_TOKENS)
    stream = client.generate(
        prompt, timeout=timeout, max_tokens=OUTPUT_TOKENS, ignore_eos=True, token_ids=True
    )
    tokens = 0
    accepted = False
    try:
        async for event in stream.events():
            accepted |= isinstance(event, Accepted)
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                outcome.tokens += len(event.token_ids)
        outcome.served.append((began, time.monotonic()))
    except ResourceExhaustedError as error:
        outcome.refused.append(time.monotonic() - began)
        outcome.dumb += error.retry_after is None
    except DeadlineExceededError:
        if accepted:
            outcome.short.append(OUTPUT_TOKENS - tokens)
        else:
            outcome.unbegun += 1
    except Error as error:
        outcome.failures.append(str(error))


async def closed_loop(client: AsyncClient, seconds: float) -> Outcome:
    """Keeps the engine busy for a while."""
    outcome = Outcome()

    async def stream(number: int) -> None:
        while True:
            number += 1000
            await ask(client, number, outcome, None)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for i in range(2 * PLACES):
                group.create_task(stream(i))
    return outcome


async def open_loop(
    client: AsyncClient, seconds: float, rate: float, timeout: float, memory: list[Memory]
) -> Outcome:
    """Sends `rate` requests a second at random times."""
    outcome = Outcome()
    draw = random.Random(1)
    end = due = time.monotonic()
    end += seconds

    async def watch() -> None:
        while True:
            for process in memory:
                process.sample()
            await asyncio.sleep(seconds / 60)

    watcher = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        number = 0
        while due < end:
            due += draw.expovariate(rate)
            await asyncio.sleep(due - time.monotonic())
            group.create_task(ask(client, number, outcome, timeout))
            number += 1
    watcher.cancel()
    return outcome


def verdict(passed: bool, what: str) -> bool:
    """Prints how one mark was met."""
    print(f"{'PASS' if passed else 'FAIL'}: {what}", flush=True)
    return passed


def judge(outcome: Outcome, goodput: float, peak: float, memory: dict[str, Memory]) -> bool:
    """Prints what came of the overload; returns whether every mark was met.

    Args:
        outcome: of the requests.
        goodput: tokens a second of requests complete in time.
        peak: tokens a second at the peak.
        memory: of the processes, by name.
    """
    print(
        f"overload: {len(outcome.served)} served, {len(outcome.refused)} refused, "
        f"{len(outcome.short)} late, {outcome.unbegun} never begun, "
        f"{len(outcome.failures)} failed {outcome.failures[:3]}"
    )
    slow = quantiles(outcome.refused, n=100)[98] if len(outcome.refused) > 1 else float("inf")
    late = [tokens for tokens in outcome.short if tokens > 1]
    passed = [
        verdict(
            goodput >= GOODPUT_MARK * peak,
            f"goodput {goodput:.0f} tokens/s, {goodput / peak:.1%} of the peak",
        ),
        verdict(
            slow < REFUSAL_MARK and not outcome.dumb,
            f"refusals took {1e3 * median(outcome.refused or [0]):.1f} ms, 99 of 100 at most "
            f"{1e3 * slow:.1f} ms; {outcome.dumb} did not say when to come back",
        ),
        verdict(
            not late and not outcome.failures,
            f"{len(late)} requests were late by more than a step, by {late[:8]} tokens",
        ),
    ]
    for name, process in memory.items():
        growth = process.growth * 60 / process.size
        passed.append(
            verdict(
                growth < GROWTH_MARK,
                f"{name}: {process.size / 2**20:.0f} MiB, {process.growth / 2**10:+.1f} KiB/s, "
                f"{growth:+.2%} a minute",
            )
        )
    return all(passed)


def _engine(model: str | None, stack: AsyncExitStack, *, paced: bool) -> Node:
    if model is not None:
        # So few blocks that all have been used, and have their memory, before that is looked at.
        own = {"dtype": "auto", "compile": "wait", "num_blocks": 512}
        return engine(model, threads=None, max_num_seqs=PLACES, **own)
    model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    if paced:
        return paced_engine(model, step_seconds=PACED_STEP, max_num_seqs=PLACES)
    return engine(model, max_num_seqs=PLACES)


async def measure(
    seconds: float, load: float, deadline: float, *, model: str | None = None, paced: bool = False
) -> bool:
    """Overloads a router and its engine; returns whether every mark was met.

    Args:
        seconds: of overload; the peak is measured for a sixth of that before and after.
        load: times the peak.
        deadline: times what a request takes at the peak.
        model: what is served; a tiny one if None.
        paced: whether the engine's capacity is fixed.
    """
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        back = await start(_engine(model, stack, paced=paced))
        front = await start(router([back.address]))
        client = await stack.enter_async_context(AsyncClient(front.address))
        await all_up(front, 1)
        memory = {
            "router": Memory(psutil.Process(front.pid)),
            "engine": Memory(psutil.Process(back.pid)),
        }
        await closed_loop(client, 2.0)  # warms all up
        span = max(seconds / 6, 2.0)
        before = await closed_loop(client, span)
        took = median(ended - began for began, ended in before.served)
        rate = before.tokens / span / OUTPUT_TOKENS
        print(f"peak: {rate:.1f} requests of {OUTPUT_TOKENS} tokens a second, {took:.2f} s each")
        timeout = deadline * took
        began = time.monotonic()
        outcome = await open_loop(client, seconds, load * rate, timeout, list(memory.values()))
        after = await closed_loop(client, span)
        print(f"peak afterwards: {after.tokens / span / OUTPUT_TOKENS:.1f} requests a second")
        # While it fills and empties, the engine does less than it can.
        served = sum(began + took < ended < began + seconds for _, ended in outcome.served)
        goodput = served * OUTPUT_TOKENS / (seconds - took)
        return judge(outcome, goodput, mean((before.tokens, after.tokens)) / span, memory)


def main() -> None:
    """Parses the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load", type=float, default=3)
    parser.add_argument("--deadline", type=float, default=4)
    parser.add_argument("--model")
    parser.add_argument("--paced", action="store_true")
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
