"""Says where a decode step's time goes, for a few sizes of batch.

    python -m benchmarks.step_profile [--model demo] [--quantization none] [--batch 1 8 48]
        [--temperature 0] [--top-p 1]

Each batch runs in a process of its own: prompts of random tokens are computed, then
decode steps are timed part by part. Matrix products and attention are what the kernels
say of themselves; products that are oneDNN's count as the rest of the model. Then a
server is started and as many streams are read from it: what its time per output token
is more than the step's is the router, gRPC and the loop between steps.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PROMPT = 160
STEPS = 40
WARM_STEPS = 5
OUTPUT = 64
PARTS = {
    "products": "matrix products",
    "attention": "attention and cache writes",
    "rest": "rest of the model",
    "sample": "sampling",
    "prepare": "batch to tensors",
    "schedule": "scheduling",
    "update": "taking tokens",
    "other": "between the parts",
    "served": "router, gRPC, core loop",
}


def main() -> None:
    """Profiles every batch and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 48])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(_profile(arguments, arguments.inside)))
        return
    columns = []
    for batch in arguments.batch:
        parts = _profile_in_child(arguments, batch)
        served = asyncio.run(_serve(arguments, batch))
        columns.append(parts | {"served": max(0.0, served - sum(parts.values()))})
    _print(arguments.batch, columns, arguments.quantization)
    if arguments.json:
        rows = dict(zip(map(str, arguments.batch), columns, strict=True))
        arguments.json.write_text(json.dumps(rows, indent=1))


def _print(batches: list[int], columns: list[dict[str, float]], quantization: str) -> None:
    table = Table(title=f"A decode step, milliseconds (quantization {quantization})")
    table.add_column("part")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
        table.add_column("share", justify="right")
    for part, name in PARTS.items():
        cells = []
        for column in columns:
            share = column[part] / sum(column.values())
            cells += [f"{column[part] * 1e3:.2f}", f"{share:.1%}"]
        table.add_row(name, *cells)
    totals = [cell for c in columns for cell in (f"{sum(c.values()) * 1e3:.2f}", "")]
    table.add_row("time per output token", *totals, style="bold")
    Console().print(table)


def _profile_in_child(arguments: argparse.Namespace, batch: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.step_profile", "--inside", str(batch)]
    for name in ("model", "quantization", "temperature", "top_p"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    parts: dict[str, float] = json.loads(line)
    return parts


def _profile(arguments: argparse.Namespace, batch: int) -> dict[str, float]:
    """Mean seconds of each part of a decode step."""
    from engine.config import EngineSettings  # noqa: PLC0415 - the child's alone
    from engine.executor import executor  # noqa: PLC0415
    from engine.startup import build  # noqa: PLC0415
    from kernels import cpu  # noqa: PLC0415
    from tests.engine.stepper import Stepper  # noqa: PLC0415

    settings: dict[str, Any] = {
        "model": arguments.model,
        "quantization": arguments.quantization,
        "compile": "wait",
    }
    needed = batch * (PROMPT + WARM_STEPS + STEPS + 16) // 16 + batch
    parts = build(EngineSettings(**settings, num_blocks=needed, swap_space=0))
    cpu.pin_threads()
    stepper: Any = Stepper(parts)
    stepper.cache.check = lambda: None  # tests look at every block after every step
    spent: defaultdict[str, float] = defaultdict(float)
    for owner, name, part in (
        (parts.scheduler, "schedule", "schedule"),
        (parts.scheduler, "update", "update"),
        (executor, "prepare", "prepare"),
        (executor, "sample", "sample"),
        (parts.executor, "_forward", "model"),
        (parts.executor, "_most_likely", "model"),
    ):
        setattr(owner, name, _timed(getattr(owner, name), spent, part))
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
    spent["attention"], spent["products"] = kernels.attention, kernels.linear
    spent["sample"] += kernels.sampling  # greedy steps do it there
    spent["rest"] = spent.pop("model") - kernels.attention - kernels.linear - kernels.sampling
    spent["other"] = total - sum(spent.values())
    return {part: seconds / STEPS for part, seconds in spent.items()}


def _sampling(arguments: argparse.Namespace) -> dict[str, float]:
    return {"temperature": arguments.temperature, "top_p": arguments.top_p}


def _live(scheduler: Any) -> list[Any]:  # noqa: ANN401
    return [*scheduler.running, *scheduler.waiting]


def _timed(
    function: Callable[..., Any], spent: defaultdict[str, float], part: str
) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent[part] += time.perf_counter() - began

    return timed


async def _serve(arguments: argparse.Namespace, batch: int) -> float:
    """Seconds per output token of so many streams at once, from a real server."""
    from octavo import AsyncClient  # noqa: PLC0415
    from octavo.cli.local_server import local_server  # noqa: PLC0415

    flags = ("--quantization", arguments.quantization, "--compile", "wait")
    sampling = _sampling(arguments)
    with local_server(arguments.model, *flags) as address:
        async with AsyncClient(address) as client:
            await _streams(client, batch, sampling)
            return statistics.median([await _streams(client, batch, sampling) for _ in range(3)])


async def _streams(client: Any, batch: int, sampling: dict[str, float]) -> float:  # noqa: ANN401
    """Seconds per token once every stream has begun, and before any ends."""
    arrivals: list[list[float]] = []
    draw = random.Random(time.monotonic_ns())

    async def one() -> None:
        prompt = [draw.randrange(256, 40000) for _ in range(PROMPT)]
        stream = client.generate(prompt, max_tokens=OUTPUT, ignore_eos=True, **sampling)
        arrivals.append([time.perf_counter() async for _ in stream])

    await asyncio.gather(*(one() for _ in range(batch)))
    all_began = max(times[0] for times in arrivals)
    gaps = [b - a for times in arrivals for a, b in pairwise(times) if a >= all_began]
    return statistics.mean(gaps)


if __name__ == "__main__":
    main()
