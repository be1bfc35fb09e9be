"""Overload an engine with requests that have deadlines, and measure its goodput.

    python -m benchmarks.overload [--seconds 60] [--load 3] [--deadline 4] [--model M | --paced]

First, streams keep the engine busy with requests without deadline: their rate is the peak. Then
requests arrive at random times, at `--load` times the peak rate, each with a deadline of
`--deadline` times the latency at the peak. Then the peak is measured again, as other work on the
machine may have changed it. The default model is tiny but real: it generates so many tokens that
router and clients slow the engine down on a few cores. `--model` serves another one, traced, on all
cores. With `--paced` steps take a fixed time, so only the router is measured. The lines say whether

    goodput     tokens of requests complete by their deadlines are within 5% of the peak
    refusals    99 of 100 come within 50 ms, and each says when to come back
    misses      no request that an engine began is late by more than one step
    memory      of router and engine does not grow
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.fixture import EOS, Node, engine, make_model, router, serving
from benchmarks.paced_engine import paced_engine
from benchmarks.report import percentiles, verdict
from octavo import AsyncClient, Delta, Error
from octavo.client import Accepted
from octavo.client.errors import DeadlineExceededError, ResourceExhaustedError

PLACES = 16
PACED_STEP = 0.01
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 128
GOODPUT_MARK = 0.95
REFUSAL_MARK_MS = 50
GROWTH_MARK = 0.02
"""Maximum growth of a process' memory per minute, as a share of it."""


@dataclass
class Outcome:
    """The outcome of requests.

    Attributes:
        served: Begin and end of each request that was complete in time.
        tokens: Tokens of all requests.
        refused: Seconds until each refusal.
        silent: Refusals that did not say when to come back.
        short: Missing tokens of each late request that an engine had begun.
        unbegun: Requests whose deadline passed before an engine began.
        failures: Errors of the other requests.
    """

    served: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    refused: list[float] = field(default_factory=list)
    silent: int = 0
    short: list[int] = field(default_factory=list)
    unbegun: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """A process' resident memory over time."""

    node: Node
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self) -> None:
        """Record the current memory."""
        self.samples.append((time.monotonic(), self.node.rss()))

    def growth(self) -> float:
        """Return bytes per second, by a line fitted to the last three quarters of the samples."""
        times, sizes = np.array(self.samples[len(self.samples) // 4 :], dtype=float).T
        return float(np.polyfit(times - times[0], sizes, 1)[0])

    def size(self) -> float:
        """Return the mean in bytes."""
        return mean(size for _, size in self.samples)


async def ask(client: AsyncClient, number: int, outcome: Outcome, timeout: float | None) -> None:
    """Send one request and record its outcome."""
    began = time.monotonic()
    prompt = random.Random(number).choices(range(EOS), k=PROMPT_TOKENS)
    stream = client.generate(
        prompt, timeout=timeout, max_tokens=OUTPUT_TOKENS, ignore_eos=True, token_ids=True
    )
    tokens = 0
    begun = False
    try:
        async for event in stream.events():
            begun |= not (isinstance(event, Accepted) and event.queue_position)
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                outcome.tokens += len(event.token_ids)
        outcome.served.append((began, time.monotonic()))
    except ResourceExhaustedError as error:
        outcome.refused.append(time.monotonic() - began)
        outcome.silent += error.retry_after is None
    except DeadlineExceededError:
        if begun:
            outcome.short.append(OUTPUT_TOKENS - tokens)
        else:
            outcome.unbegun += 1
    except Error as error:
        outcome.failures.append(str(error))


async def closed_loop(client: AsyncClient, seconds: float) -> Outcome:
    """Keep the engine busy for `seconds` seconds."""
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
    """Send `rate` requests per second at random times."""
    outcome = Outcome()
    draw = random.Random(1)

    async def watch() -> None:
        while True:
            for process in memory:
                process.sample()
            await asyncio.sleep(seconds / 60)

    watcher = asyncio.create_task(watch())
    due = time.monotonic()
    end, number = due + seconds, 0
    async with asyncio.TaskGroup() as group:
        while due < end:
            due += draw.expovariate(rate)
            await asyncio.sleep(due - time.monotonic())
            group.create_task(ask(client, number, outcome, timeout))
            number += 1
    watcher.cancel()
    return outcome


def judge(outcome: Outcome, goodput: float, peak: float, memory: dict[str, Memory]) -> bool:
    """Print the outcome of the overload; return whether all limits are met.

    Args:
        outcome: Outcome of the requests.
        goodput: Tokens per second of requests that were complete in time.
        peak: Tokens per second at the peak.
        memory: Memory of the processes, by name.
    """
    print(
        f"overload: {len(outcome.served)} served, {len(outcome.refused)} refused, "
        f"{len(outcome.short)} late, {outcome.unbegun} never begun, "
        f"{len(outcome.failures)} failed {outcome.failures[:3]}"
    )
    typical, slow, _ = percentiles(outcome.refused)
    late = [tokens for tokens in outcome.short if tokens > 1]
    passed = [
        verdict(
            goodput >= GOODPUT_MARK * peak,
            f"goodput {goodput:.0f} tokens/s, {goodput / peak:.1%} of the peak",
        ),
        verdict(
            bool(outcome.refused) and slow < REFUSAL_MARK_MS and not outcome.silent,
            f"refusals took {typical:.1f} ms, 99 of 100 at most {slow:.1f} ms; "
            f"{outcome.silent} did not say when to come back",
        ),
        verdict(
            not late and not outcome.failures,
            f"{len(late)} requests were late by more than a step, by {late[:8]} tokens",
        ),
    ]
    for name, process in memory.items():
        size, growth = process.size(), process.growth()
        a_minute = growth * 60 / size
        passed.append(
            verdict(
                a_minute < GROWTH_MARK,
                f"{name}: {size / 2**20:.0f} MiB, {growth / 2**10:+.1f} KiB/s, "
                f"{a_minute:+.2%} a minute",
            )
        )
    return all(passed)


def _engine(model: str | None, tiny: str, *, paced: bool) -> Node:
    if model is not None:
        # So few blocks that all are in use, and have memory, before the measurement.
        options = {"dtype": "auto", "compile": "auto", "num_blocks": 512}
        return engine(model, threads=None, max_num_seqs=PLACES, **options)
    if paced:
        return paced_engine(tiny, step_seconds=PACED_STEP, max_num_seqs=PLACES)
    return engine(tiny, max_num_seqs=PLACES)


async def measure(
    seconds: float, load: float, deadline: float, *, model: str | None = None, paced: bool = False
) -> bool:
    """Overload a router and its engine; return whether all limits are met.

    Args:
        seconds: Duration of the overload; the peak takes a sixth of it before and after.
        load: Ratio of the request rate to the peak rate.
        deadline: Deadline of each request, as a multiple of its latency at the peak.
        model: The model to serve; None: the tiny model.
        paced: Whether the engine's capacity is fixed.
    """
    with tempfile.TemporaryDirectory() as directory:
        back = _engine(model, make_model(Path(directory)), paced=paced)
        front = router([back.address])
        async with serving([back], front) as client:
            memory = {"router": Memory(front), "engine": Memory(back)}
            await closed_loop(client, 2.0)  # warm-up
            span = max(seconds / 6, 2.0)
            before = await closed_loop(client, span)
            took = median(ended - began for began, ended in before.served)
            rate = before.tokens / span / OUTPUT_TOKENS
            print(
                f"peak: {rate:.1f} requests of {OUTPUT_TOKENS} tokens a second, {took:.2f} s each"
            )
            timeout = deadline * took
            began = time.monotonic()
            outcome = await open_loop(client, seconds, load * rate, timeout, [*memory.values()])
            after = await closed_loop(client, span)
    print(f"peak afterwards: {after.tokens / span / OUTPUT_TOKENS:.1f} requests a second")
    # While the engine fills and drains, it runs below capacity.
    served = sum(began + took < ended < began + seconds for _, ended in outcome.served)
    goodput = served * OUTPUT_TOKENS / (seconds - took)
    return judge(outcome, goodput, mean((before.tokens, after.tokens)) / span, memory)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load", type=float, default=3)
    parser.add_argument("--deadline", type=float, default=4)
    parser.add_argument("--model")
    parser.add_argument("--paced", action="store_true")
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
