"""Measure requests of many adapters against the base model at the same batch.

    python -m benchmarks.adapters [--adapters 64] [--rank 16] [--targets q_proj,v_proj] [--peer]

One request for each adapter, all at once, in one engine of this process: all of the base model, all
of one adapter, and each of an adapter of its own. The ways take turns. It prints output tokens per
second; time is that of the steps, without router and network. With --peer, vLLM for CPUs runs the
same requests in the same run, without adapters and with an adapter each. Last, it prints the
longest time between two tokens of 32 streams, with adapters being loaded beside them and without.
"""

import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from benchmarks.peers.environments import provide
from benchmarks.peers.registry import VLLM, default_folder
from benchmarks.peers.worker_process import WorkerProcess, worker_command, worker_variables
from benchmarks.peers.workers import protocol
from octavo.common import logging
from octavo.common.models.resolve import resolve
from octavo.common.sampling_parameters import SamplingParams
from octavo.common.thread_priority import lower_priority
from octavo.engine.adapters.adapted_model import linear_layers
from octavo.engine.adapters.adapter import Adapter
from octavo.engine.core import EngineCore
from octavo.engine.metrics import EngineMetrics
from octavo.engine.models.empty_model import make_empty
from octavo.engine.models.quantization.checkpoints import find_format
from octavo.engine.models.quantization.checkpoints.reader import read_config
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import Parts, build
from octavo.kernels import cpu

PROMPT_TOKENS = 64
STREAMS, STREAM_TOKENS = 32, 96
PATIENCE = 900.0
BASE, EACH = "base", "an adapter each"


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second of a run.

    Attributes:
        whole: From handing over the requests to the last token.
        decodes: Of the time when all prompts are computed.
    """

    whole: float
    decodes: float


def main(
    *,
    model: Annotated[str, typer.Option(help="As `octavo engine --model`.")] = "demo",
    quantization: Annotated[str, typer.Option(help="As `octavo engine`.")] = "none",
    adapters: Annotated[int, typer.Option(help="Adapters, and requests.")] = 64,
    rank: Annotated[int, typer.Option(help="Rank of every adapter.")] = 16,
    targets: Annotated[str, typer.Option(help="Names of the adapted layers.")] = "q_proj,v_proj",
    tokens: Annotated[int, typer.Option(help="Output tokens of a request.")] = 32,
    rounds: Annotated[int, typer.Option(help="Turns of each way.")] = 3,
    peer: Annotated[bool, typer.Option(help="Run vLLM for CPUs beside it.")] = False,
) -> None:
    """Run the benchmark and print a table."""
    logging.configure("console", "error")
    with tempfile.TemporaryDirectory() as folder:
        paths = save_adapters(model, Path(folder), adapters, rank, targets.split(","))
        settings = EngineSettings(
            model=model,
            quantization=quantization,
            lora=[f"{path.name}={path}" for path in paths],
            enable_prefix_caching=False,
        )
        parts = build(settings)
        print(f"compiled: {parts.executor.compiled}", flush=True)
        rates = measure(parts, adapters, tokens, rounds)
        size = sum(adapter.nbytes for adapter in parts.adapters or ()) >> 20
        print(f"{adapters} requests, rank {rank} of {targets}, {size} MiB of adapters")
        report(rates)
        if peer:
            options = {"adapters": os.pathsep.join(map(str, paths)), "rank": str(rank)}
            setup = protocol.Setup(resolve(model), torch.get_num_threads(), 1.0, options)
            report(measure_peer(setup, adapters, tokens, rounds))
        # Processes and threads that are started after this would be pinned too.
        cpu.pin_threads(parts.threads.places)  # as an engine's
        print_gaps(parts, paths[0])


def measure(parts: Parts, adapters: int, tokens: int, rounds: int) -> dict[str, list[Rates]]:
    """Return the rates of each way, of each turn."""
    assert parts.adapters is not None
    loaded = list(parts.adapters)
    ways: dict[str, list[Adapter | None]] = {
        BASE: [None] * adapters,
        "one adapter": [loaded[0]] * adapters,
        EACH: list(loaded),
    }
    rates: dict[str, list[Rates]] = {name: [] for name in ways}
    core = new_core(parts)
    numbers = itertools.count()
    for turn in range(rounds + 1):  # the first one warms up
        for name, own in ways.items():
            rate = run(core, parts, own, tokens, numbers)
            rates[name] += [rate] * (turn > 0)
            print(f"turn {turn}: {name} {rate.decodes:.1f} tokens/s", flush=True)
    return rates


def measure_peer(
    setup: protocol.Setup, adapters: int, tokens: int, rounds: int
) -> dict[str, list[Rates]]:
    """Return vLLM's rates: it is loaded once to take adapters, as Octavo is."""
    python = provide(VLLM, default_folder())
    command, variables = worker_command(python, "vllm"), worker_variables(setup.threads)
    rates: dict[str, list[Rates]] = {f"vLLM, {name}": [] for name in (BASE, EACH)}
    log = default_folder() / "vllm-adapters.log"
    with WorkerProcess(command, variables, log, PATIENCE) as worker:
        worker.load(setup)
        for turn in range(rounds + 1):
            for name in rates:
                numbers = range(adapters) if name.endswith(EACH) else [-1] * adapters
                requests = [
                    protocol.Request(prompt, tokens, adapter=number)
                    for prompt, number in zip(prompts(adapters), numbers, strict=True)
                ]
                rate = as_rates(worker.run(requests), tokens)
                rates[name] += [rate] * (turn > 0)
                print(f"turn {turn}: {name} {rate.whole:.1f} tokens/s", flush=True)
    return rates


def as_rates(outcome: protocol.Outcome, tokens: int) -> Rates:
    """Return a peer's rates; those of decodes from the last of the first tokens on."""
    count = len(outcome.outputs)
    first = max(outcome.first_token_seconds or [0.0])
    return Rates(count * tokens / outcome.seconds, count * (tokens - 1) / (outcome.seconds - first))


def report(rates: dict[str, list[Rates]]) -> None:
    """Print each way's rates; the first is the base."""
    base = statistics.median(rate.decodes for rate in next(iter(rates.values())))
    for name, found in rates.items():
        decodes = [rate.decodes for rate in found]
        middle = statistics.median(decodes)
        whole = statistics.median(rate.whole for rate in found)
        print(
            f"{name:22} {middle:8.1f} tokens/s ({min(decodes):.1f}-{max(decodes):.1f}),"
            f" {middle / base:.2f} of the base; with prompts {whole:.1f}"
        )


def print_gaps(parts: Parts, path: Path) -> None:
    """Print the times between two tokens of streams of the base and of adapters."""
    for name, loads in (("", False), (", adapters being loaded", True)):
        gaps, loaded = stream(parts, path, loads=loads)
        print(
            f"{STREAMS} streams{name}: a step takes {1000 * statistics.median(gaps):.1f} ms,"
            f" the longest {1000 * max(gaps):.1f} ms; {loaded} loads"
        )


def stream(parts: Parts, path: Path, *, loads: bool) -> tuple[list[float], int]:
    """Return the times between the tokens of streams, and how many adapters were loaded."""
    registry = parts.adapters
    assert registry is not None
    own = [None, *registry][: STREAMS // 2]
    ended, done = threading.Event(), []

    def load() -> None:
        os.sched_setaffinity(threading.get_native_id(), parts.threads.cpus)  # this thread's alone
        lower_priority()  # as the engine's service does
        while not ended.is_set():
            registry.add(registry.read("again", path))
            registry.remove("again")
            done.append(path)

    core = new_core(parts)
    for number in range(STREAMS):
        submit(core, prompts(1)[0], STREAM_TOKENS, own[number % len(own)], str(number))
    while has_prompts(parts):
        core.step()
    thread = threading.Thread(target=load)
    if loads:
        thread.start()
    gaps = []
    while core.working:
        began = time.perf_counter()
        core.step()
        gaps.append(time.perf_counter() - began)
    ended.set()
    if loads:
        thread.join()
    return gaps, len(done)


def save_adapters(
    model: str, folder: Path, count: int, rank: int, targets: list[str]
) -> list[Path]:
    """Save random adapters in peft's format; return their directories."""
    path = resolve(model)
    config = read_config(path, quantized=find_format(Path(path)) is not None)
    layers = linear_layers(make_empty(config, torch.bfloat16))
    chosen = {name: layer for name, layer in layers.items() if name.split(".")[-1] in targets}
    if not chosen:
        raise typer.BadParameter(f"no layer is named {' or '.join(targets)}")
    torch.manual_seed(0)
    paths = []
    for number in range(count):
        adapter = folder / f"adapter-{number:03}"
        adapter.mkdir()
        tensors = {}
        for name, layer in chosen.items():
            shapes = {"A": (rank, layer.inputs), "B": (layer.outputs, rank)}
            for part, shape in shapes.items():
                key = f"base_model.model.{name}.lora_{part}.weight"
                tensors[key] = (0.01 * torch.randn(shape)).bfloat16()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(
            json.dumps(
                {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
            )
        )
        paths.append(adapter)
    return paths


def run(
    core: EngineCore,
    parts: Parts,
    adapters: list[Adapter | None],
    tokens: int,
    numbers: Iterator[int],
) -> Rates:
    """Run a request for each adapter."""
    handed = time.perf_counter()
    for adapter, prompt in zip(adapters, prompts(len(adapters)), strict=True):
        submit(core, prompt, tokens, adapter, str(next(numbers)))
    while has_prompts(parts):
        core.step()
    before = sum(sequence.num_output for g in parts.scheduler.groups() for sequence in g.sequences)
    began = time.perf_counter()
    while core.working:
        core.step()
    ended = time.perf_counter()
    count = tokens * len(adapters)
    return Rates(count / (ended - handed), (count - before) / (ended - began))


def new_core(parts: Parts) -> EngineCore:
    """Return an engine's loop, to be stepped by hand."""
    return EngineCore(
        parts.scheduler, parts.executor, EngineMetrics(), lambda *_: None, max_waiting=1 << 20
    )


def prompts(count: int) -> list[list[int]]:
    """Return random prompts."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, 1000, (count, PROMPT_TOKENS), generator=draw).tolist()


def submit(
    core: EngineCore, prompt: list[int], tokens: int, adapter: Adapter | None, number: str
) -> None:
    """Submit a greedy request."""
    request = Request(
        session=0,
        request_id=number,
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=tokens,
        arrival=time.monotonic(),
        adapter=adapter,
    )
    core.requests.submit(request)


def has_prompts(parts: Parts) -> bool:
    """Return whether prompts are still to be computed."""
    scheduler = parts.scheduler
    return bool(scheduler.waiting) or any(g.decoder is None for g in scheduler.running)


if __name__ == "__main__":
    typer.run(main)
