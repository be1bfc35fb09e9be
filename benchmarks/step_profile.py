"""Measure where a decode step's time goes, for a few batch sizes.

    python -m benchmarks.step_profile [--model demo] [--quantization none] [--batch 1 8 48]
        [--temperature 0] [--top-p 1]

Each batch runs in a process of its own: prompts of random tokens are computed, then
decode steps are timed part by part. Matrix products and attention are what the kernels
say of themselves; products that are oneDNN's count as the rest of the model.

Then a server is started and as many streams are read from it. Of these steps it says how
long they were, how long the threads that compute waited for a core, which others had (by
Linux's accounts, their mean), and the CPU time of those others.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import psutil
import uvloop

from benchmarks.processor_time import thread_times, timed
from benchmarks.report import table
from octavo import AsyncClient
from octavo.cli.local_server import local_server

PROMPT = 160
STEPS = 40
WARM_STEPS = 5
OUTPUT = 120
PARTS = {
    "products": "matrix products",
    "attention": "attention, states and cache writes",
    "rest": "rest of the model",
    "sample": "sampling",
    "prepare": "batch to tensors",
    "schedule": "scheduling",
    "update": "taking tokens",
    "other": "between the parts",
}
SERVED = {
    "time per output token": "token",
    "computing threads wait for a core": "waits",
    "CPU time of the router": "router",
    "CPU time of the client": "client",
    "CPU time of the engine's other threads": "engine",
}
COMPUTING = 0.5
"""A thread that runs for this share of the time computes."""


def main() -> None:
    """Profile every batch and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 48])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(_profile(arguments, arguments.inside)))
        return
    inside = {batch: _profile_in_child(arguments, batch) for batch in arguments.batch}
    print(f"A decode step, milliseconds (quantization {arguments.quantization})\n")
    print(_parts_table(inside))
    print(
        f"\nServed, milliseconds a step\n\n{_served_table(uvloop.run(_serve(arguments)), inside)}"
    )


def _parts_table(found: dict[int, dict[str, float]]) -> str:
    totals = [sum(parts.values()) for parts in found.values()]

    def row(name: str, seconds: list[float]) -> list[str]:
        pairs = zip(seconds, totals, strict=True)
        return [
            name,
            *(cell for s, total in pairs for cell in (f"{s * 1e3:.2f}", f"{s / total:.1%}")),
        ]

    rows = [row(name, [parts[part] for parts in found.values()]) for part, name in PARTS.items()]
    products = [parts["products"] + parts["attention"] for parts in found.values()]
    others = [total - product for total, product in zip(totals, products, strict=True)]
    rows += [row("a step", totals), row("neither product nor attention", others)]
    return table(["part", *(cell for batch in found for cell in (f"batch {batch}", "share"))], rows)


def _served_table(found: dict[int, dict[str, float]], inside: dict[int, dict[str, float]]) -> str:
    rows = [
        [name, *(f"{figures[key] * 1e3:.2f}" for figures in found.values())]
        for name, key in SERVED.items()
    ]
    shares = [_shares(inside[batch], figures) for batch, figures in found.items()]
    names = "with the waits for the engine's own threads", "with all waits"
    for name, row in zip(names, zip(*shares, strict=True), strict=True):
        cells = (f"{share:.1%}" for share in row)
        rows.append([f"neither product nor attention, {name}", *cells])
    return table(["served", *(f"batch {batch}" for batch in found)], rows)


def _shares(parts: dict[str, float], served: dict[str, float]) -> tuple[float, float]:
    """Return the share of a served step outside products and attention: the engine's, and all.

    The computing threads wait for the others by as much as those compute.
    """
    others = sum(parts.values()) - parts["products"] - parts["attention"]
    own = served["engine"] / (served["engine"] + served["router"] + served["client"])
    waits, step = served["waits"], served["token"]
    return (others + waits * own) / step, (others + waits) / step


def _profile_in_child(arguments: argparse.Namespace, batch: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.step_profile", "--inside", str(batch)]
    for name in ("model", "quantization", "temperature", "top_p"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    parts: dict[str, float] = json.loads(line)
    return parts


def _profile(arguments: argparse.Namespace, batch: int) -> dict[str, float]:
    """Return the mean seconds of each part of a decode step."""
    from octavo.engine.running import executor  # noqa: PLC0415
    from octavo.engine.settings import EngineSettings  # noqa: PLC0415 - the child's alone
    from octavo.engine.startup import build  # noqa: PLC0415
    from octavo.kernels import cpu  # noqa: PLC0415
    from tests.engine.stepper import Stepper  # noqa: PLC0415

    settings: dict[str, Any] = {
        "model": arguments.model,
        "quantization": arguments.quantization,
    }
    needed = batch * (PROMPT + WARM_STEPS + STEPS + 16) // 16 + batch
    parts = build(EngineSettings(**settings, num_blocks=needed, swap_space=0))
    cpu.pin_threads(parts.threads.places)
    stepper: Any = Stepper(parts)
    stepper.cache.check = lambda: None  # tests look at every block after every step
    spent: defaultdict[str, float] = defaultdict(float)

    def add(part: str, seconds: float) -> None:
        spent[part] += seconds

    for owner, name, part in (
        (parts.scheduler, "schedule", "schedule"),
        (parts.scheduler, "advance", "update"),
        (parts.scheduler, "update", "update"),
        (parts.executor, "prepare", "prepare"),
        (executor, "sample", "sample"),
        (parts.executor, "_forward", "model"),
        (parts.executor, "_most_likely", "model"),
        (cpu, "argmax", "greedy"),  # within the model's time, as the next one
        (cpu, "mask_logits", "greedy"),
    ):
        setattr(owner, name, timed(getattr(owner, name), add, part))
    draw = random.Random(0)
    for _ in range(batch):
        prompt = [draw.randrange(256, parts.limits.vocab_size) for _ in range(PROMPT)]
        stepper.submit(prompt, WARM_STEPS + STEPS + 8, **_sampling(arguments))
    while any(group.sequences[0].num_output < WARM_STEPS for group in _live(parts.scheduler)):
        stepper.step()
    spent.clear()
    cpu.take_spent()
    began = time.perf_counter()
    for _ in range(STEPS):
        stepper.step()
    total = time.perf_counter() - began
    kernels = cpu.take_spent()
    spent["attention"], spent["products"] = kernels.attention + kernels.states, kernels.linear
    greedy = spent.pop("greedy", 0.0)
    spent["sample"] += greedy
    spent["rest"] = spent.pop("model") - spent["attention"] - spent["products"] - greedy
    spent["other"] = total - sum(spent.values())
    return {part: seconds / STEPS for part, seconds in spent.items()}


def _sampling(arguments: argparse.Namespace) -> dict[str, float]:
    return {"temperature": arguments.temperature, "top_p": arguments.top_p}


def _live(scheduler: Any) -> list[Any]:  # noqa: ANN401
    return [*scheduler.running, *scheduler.waiting]


async def _serve(arguments: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return figures of a real server's steps by the number of streams read at once."""
    flags = ("--quantization", arguments.quantization)
    with local_server(arguments.model, *flags) as address:
        router, *others = psutil.Process().children(recursive=True)
        engine = max(others, key=lambda process: process.memory_info().rss)
        processes = {"router": router.pid, "client": os.getpid(), "engine": engine.pid}
        async with AsyncClient(address) as client:
            await _Streams(client, arguments.batch[0], arguments).measure(processes)
            return {
                batch: await _Streams(client, batch, arguments).measure(processes)
                for batch in arguments.batch
            }


class _Streams:
    """Streams of tokens, read at once."""

    def __init__(self, client: AsyncClient, count: int, arguments: argparse.Namespace) -> None:
        self._client = client
        self._sampling = _sampling(arguments)
        self._tokens = [0] * count

    async def measure(self, processes: dict[str, int]) -> dict[str, float]:
        """Read the streams; return figures of the time when all run."""
        tasks = [asyncio.create_task(self._read(i)) for i in range(len(self._tokens))]
        while min(self._tokens) < WARM_STEPS:  # noqa: ASYNC110 - by the tasks above
            await asyncio.sleep(0.01)
        began, tokens, before = time.perf_counter(), sum(self._tokens), _threads(processes)
        while max(self._tokens) < OUTPUT - 1:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0.01)
        seconds = time.perf_counter() - began
        steps = (sum(self._tokens) - tokens) / len(self._tokens)
        after = _threads(processes)
        await asyncio.gather(*tasks)
        figures: defaultdict[str, float] = defaultdict(float, token=seconds)
        waits = []
        for thread, (ran, waited) in after.items():
            ran_before, waited_before = before.get(thread, (0, 0))
            if ran - ran_before > COMPUTING * seconds:
                waits.append(waited - waited_before)
            else:
                figures[thread[0]] += ran - ran_before
        figures["waits"] = statistics.mean(waits)
        return {name: seconds / steps for name, seconds in figures.items()}

    async def _read(self, i: int) -> None:
        draw = random.Random(time.monotonic_ns())
        prompt = [draw.randrange(256, 40000) for _ in range(PROMPT)]
        stream = self._client.generate(
            prompt, max_tokens=OUTPUT, ignore_eos=True, token_ids=True, **self._sampling
        )
        async for delta in stream:
            self._tokens[i] += len(delta.token_ids)


def _threads(processes: dict[str, int]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return the times of each thread, by the process' name and its id."""
    return {
        (name, thread): times
        for name, process in processes.items()
        for thread, times in thread_times(process).items()
    }


if __name__ == "__main__":
    main()
