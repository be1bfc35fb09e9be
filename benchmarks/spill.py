"""Decode one sequence that is longer than the KV cache, and measure the file that holds the rest.

    python -m benchmarks.spill DIRECTORY [--model demo] [--tokens 131072] [--cache 1]
        [--space 4] [--decodes 8] [--dtype bfloat16] [--prefill] [--compare]

Keys and values of the prompt are random, unless --prefill computes them. Printed are the time of a
decode, the bytes of the file that it reads per second, the bandwidth of plain direct reads of that
file, and the growth of the process's memory. With --compare, an engine with enough memory decodes
the same, and the largest difference of logits is printed too.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.report import table
from octavo.engine.execution.executor import Executor
from octavo.engine.memory.spill_file import SpillFile
from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.progress import advance, update
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.scheduling.sequence import new_group
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts, build
from octavo.engine.startup.find_model import find_model

READ_BYTES = 8 << 20
READERS = (1, 4)


class Decodes(NamedTuple):
    """What came of one engine.

    Attributes:
        seconds: Time of each decode.
        logits: Logits of each.
        file_bytes: Bytes of the file that one decode reads.
        bandwidth: Bytes per second of plain reads of the file.
        growth: Growth of the process's resident memory, in bytes.
        prefill: Seconds of the prompt.
    """

    seconds: list[float]
    logits: torch.Tensor
    file_bytes: int
    bandwidth: float
    growth: int
    prefill: float


def main() -> None:
    """Run the engines and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--cache", type=float, default=1.0, help="GiB")
    parser.add_argument("--space", type=float, default=4.0, help="GiB of the file")
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    with _longer(arguments.model, arguments.tokens + arguments.decodes + 1) as model:
        common = {
            "model": str(model),
            "dtype": arguments.dtype,
            "swap_space": 0,
            "max_num_batched_tokens": arguments.step_tokens,
            "enable_prefix_caching": False,
        }
        spilled = {
            "cache_memory": arguments.cache,
            "kv_spill": arguments.directory,
            "kv_spill_space": arguments.space,
        }
        result = _decode(build(EngineSettings(**common | spilled)), arguments)
        median = sorted(result.seconds)[len(result.seconds) // 2]
        rate = result.file_bytes / median
        rows = [
            ("prompt, s", f"{result.prefill:.1f}"),
            ("decode, s", f"{median:.3f}"),
            ("read from the file per decode, GB", f"{result.file_bytes / 1e9:.2f}"),
            ("read while decoding, GB/s", f"{rate / 1e9:.2f}"),
            ("plain reads of the file, GB/s", f"{result.bandwidth / 1e9:.2f}"),
            ("share", f"{rate / result.bandwidth:.2f}"),
            ("growth of memory, GB", f"{result.growth / 1e9:.2f}"),
        ]
        if arguments.compare:
            blocks = arguments.tokens // 16 + 64
            other = _decode(build(EngineSettings(**common | {"num_blocks": blocks})), arguments)
            most = (other.logits - result.logits).abs().max().item()
            rows += [
                (
                    "decode with enough memory, s",
                    f"{sorted(other.seconds)[len(other.seconds) // 2]:.3f}",
                ),
                ("largest difference of logits", f"{most:g}"),
            ]
    print(table(("", ""), rows))


@contextmanager
def _longer(model: str, context: int) -> Iterator[Path]:
    """Yield a directory with the model's files and a longer context in its config."""
    path, _ = find_model(EngineSettings(model=model))
    with tempfile.TemporaryDirectory() as made:
        for file in path.iterdir():
            (Path(made) / file.name).symlink_to(file.resolve())
        config = json.loads((path / "config.json").read_text())
        (Path(made) / "config.json").unlink()
        longer = config | {"max_position_embeddings": context}
        (Path(made) / "config.json").write_text(json.dumps(longer))
        yield Path(made)


@torch.inference_mode()
def _decode(parts: Parts, arguments: argparse.Namespace) -> Decodes:
    """Fill the cache with a prompt, and decode."""
    scheduler, executor = parts.scheduler, parts.executor
    while executor.cache.populate():
        pass
    draw = random.Random(0)
    prompt = tuple(draw.randrange(3, 1000) for _ in range(arguments.tokens))
    sampling = SamplingParams(temperature=0.0, logprobs=1)  # so that the step returns logits
    request = Request(0, "long", prompt, sampling, arguments.decodes + 1, time.monotonic())
    group = new_group(request, iter(range(1)))
    scheduler.submit(group)
    memory, began = psutil.Process(), time.perf_counter()
    before = most = memory.memory_info().rss
    seconds: list[float] = []
    logits: list[torch.Tensor] = []
    while not scheduler.idle:
        start = time.perf_counter()
        batch = scheduler.schedule()
        computes = arguments.prefill or bool(batch.rest[0].sampled)
        inputs = executor.prepare(batch)
        if computes:
            step = executor.launch(batch, inputs)
            if batch.rest[0].sampled:
                assert step.logits is not None
                logits.append(step.logits.float().clone())
            executor.sample(step)
            advance(scheduler, batch)
            update(scheduler, batch, step.collect())
            if batch.rest[0].end - batch.rest[0].start == 1:
                seconds.append(time.perf_counter() - start)
            else:
                prefill = time.perf_counter() - began
        else:
            _fill(executor, batch)
            advance(scheduler, batch)
        most = max(most, memory.memory_info().rss)
        spilled = batch.spilled
    file, units = executor.cache.spill, 0 if spilled is None else spilled[1].num_units
    file_bytes, bandwidth = 0, 0.0
    if file is not None:
        file_bytes = len(executor.cache.layers) * units * file.plan.unit_bytes
        bandwidth = max(_bandwidth(file, units, readers) for readers in READERS)
    return Decodes(seconds, torch.cat(logits), file_bytes, bandwidth, most - before, prefill)


def _fill(executor: Executor, batch: Batch) -> None:
    """Make up the keys and values of a step's tokens: the same ones in every engine."""
    (scheduled,) = batch.rest
    size = executor.cache.layout.groups[0].block_size
    for number in range(scheduled.start // size, scheduled.end // size):
        block = executor.cache.device[scheduled.tables[0][number]]
        block.copy_(torch.randn(len(block), generator=torch.Generator().manual_seed(number)))


def _bandwidth(file: SpillFile, units: int, readers: int) -> float:
    """Return the bytes per second of direct reads of the layers' units by some threads."""
    layers, unit_bytes = len(file.plan.layout.places), file.plan.unit_bytes
    reads = [
        (layer * file.plan.num_units * unit_bytes + at, min(READ_BYTES, units * unit_bytes - at))
        for layer in range(layers)
        for at in range(0, units * unit_bytes, READ_BYTES)
    ]
    buffers = [mmap(-1, READ_BYTES) for _ in range(readers)]

    def read(number: int) -> None:
        for offset, count in reads[number::readers]:
            os.preadv(file.fileno(), [memoryview(buffers[number])[:count]], offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    return layers * units * unit_bytes / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
