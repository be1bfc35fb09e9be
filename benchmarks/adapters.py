"""Measure requests of many adapters against the base model at the same batch.

    python -m benchmarks.adapters [--adapters 64] [--rank 16] [--targets q_proj,v_proj]

One request for each adapter, all at once, in one engine of this process: all of the base model, as
it is compiled and uncompiled, and each of an adapter of its own. The ways take turns. It prints
output tokens per second; time is that of the steps, without router and network.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from octavo.common import logging
from octavo.common.models.resolve import resolve
from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.adapters.adapted_model import linear_layers
from octavo.engine.adapters.adapter import Adapter
from octavo.engine.commands import Submit
from octavo.engine.core import EngineCore
from octavo.engine.metrics import EngineMetrics
from octavo.engine.models.empty_model import make_empty
from octavo.engine.models.quantization.checkpoints import find_format
from octavo.engine.models.quantization.checkpoints.reader import read_config
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import Parts, build

PROMPT_TOKENS = 64


def main(
    *,
    model: Annotated[str, typer.Option(help="As `octavo engine --model`.")] = "demo",
    adapters: Annotated[int, typer.Option(help="Adapters, and requests.")] = 64,
    rank: Annotated[int, typer.Option(help="Rank of every adapter.")] = 16,
    targets: Annotated[str, typer.Option(help="Names of the adapted layers.")] = "q_proj,v_proj",
    tokens: Annotated[int, typer.Option(help="Output tokens of a request.")] = 32,
    rounds: Annotated[int, typer.Option(help="Turns of each way.")] = 3,
    compile_first: Annotated[bool, typer.Option(help="Compile before measuring.")] = True,
) -> None:
    """Run the benchmark and print a table."""
    logging.configure("console", "error")
    with tempfile.TemporaryDirectory() as folder:
        paths = save_adapters(model, Path(folder), adapters, rank, targets.split(","))
        settings = EngineSettings(
            model=model,
            compile="wait" if compile_first else "off",
            lora=[f"{path.name}={path}" for path in paths],
            enable_prefix_caching=False,
        )
        parts = build(settings)
    assert parts.adapters is not None
    loaded = list(parts.adapters)
    core = EngineCore(
        parts.scheduler, parts.executor, EngineMetrics(), lambda *_: None, max_waiting=1 << 20
    )
    ways: dict[str, list[Adapter | None]] = {
        "base": [None] * adapters,
        "one adapter": [loaded[0]] * adapters,
        "an adapter each": list(loaded),
    }
    rates: dict[str, list[float]] = {name: [] for name in (*ways, "base, uncompiled")}
    numbers = itertools.count()
    for turn in range(rounds + 1):  # the first one warms up
        for name, own in ways.items():
            rate = run(core, parts, own, tokens, numbers)
            rates[name] += [rate] * (turn > 0)
            print(f"turn {turn}: {name} {rate:.1f} tokens/s", flush=True)
        with uncompiled(parts):
            rate = run(core, parts, ways["base"], tokens, numbers)
        rates["base, uncompiled"] += [rate] * (turn > 0)
    base = statistics.median(rates["base"])
    size = sum(adapter.nbytes for adapter in loaded) >> 20
    print(f"{adapters} requests, rank {rank} of {targets}, {size} MiB of adapters, {parts.dtype}")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(
            f"{name:18} {middle:8.1f} tokens/s ({min(found):.1f}-{max(found):.1f}),"
            f" {middle / base:.2f} of the base"
        )


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
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
        )
        paths.append(adapter)
    return paths


def run(
    core: EngineCore,
    parts: Parts,
    adapters: list[Adapter | None],
    tokens: int,
    numbers: Iterator[int],
) -> float:
    """Run a request for each adapter; return output tokens per second of the decodes.

    The time begins when all prompts are computed.
    """
    draw = torch.Generator().manual_seed(0)
    groups = []
    for adapter in adapters:
        prompt = torch.randint(3, 1000, (PROMPT_TOKENS,), generator=draw).tolist()
        request = Request(
            session=0,
            request_id=str(next(numbers)),
            prompt=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            arrival=time.monotonic(),
            adapter=adapter,
        )
        core.handle(Submit(request))
        groups.append(request)
    while parts.scheduler.waiting or any(g.decoder is None for g in parts.scheduler.running):
        core.step()
    before = sum(sequence.num_output for g in parts.scheduler.groups() for sequence in g.sequences)
    began = time.perf_counter()
    while core.working:
        core.step()
    return (tokens * len(adapters) - before) / (time.perf_counter() - began)


@contextmanager
def uncompiled(parts: Parts) -> Iterator[None]:
    """Run the uncompiled model, as steps with adapters do."""
    loaded = parts.executor._loaded  # noqa: SLF001 - for this benchmark only
    assert loaded.adapted is not None
    compiled, loaded._step = loaded.step, loaded.adapted.step  # noqa: SLF001
    yield
    loaded._step = compiled  # noqa: SLF001


if __name__ == "__main__":
    typer.run(main)
