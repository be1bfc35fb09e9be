"""Measure the parts of a decode step, for a few batch sizes.

    python -m benchmarks.step_profile [--model demo] [--quantization none] [--batch 1 8 48]
        [--temperature 0] [--top-p 1]

Each batch runs in its own process: it prefills prompts of random tokens, then times decode steps
part by part. The kernels themselves report matrix products and attention; oneDNN's products count
as the rest of the model. `benchmarks.host_time` measures a served step's time besides the model.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

from benchmarks.processor_time import timed
from benchmarks.report import table

PROMPT = 160
STEPS = 40
WARM_STEPS = 5
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
    from octavo.engine.core import step as core_step  # noqa: PLC0415
    from octavo.engine.execution import executor  # noqa: PLC0415
    from octavo.engine.settings import EngineSettings  # noqa: PLC0415 - only in the child
    from octavo.engine.startup.build import build  # noqa: PLC0415
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
    stepper.cache.check = lambda: None  # a check for tests, after every step
    spent: defaultdict[str, float] = defaultdict(float)

    def add(part: str, seconds: float) -> None:
        spent[part] += seconds

    for owner, name, part in (
        (parts.scheduler, "schedule", "schedule"),
        (core_step, "advance", "update"),
        (core_step, "update", "update"),
        (parts.executor, "prepare", "prepare"),
        (executor, "sample", "sample"),
        (parts.executor, "_forward", "model"),
        (parts.executor, "_most_likely", "model"),
        (cpu, "argmax", "greedy"),  # part of the model's time, as the next one
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


if __name__ == "__main__":
    main()
