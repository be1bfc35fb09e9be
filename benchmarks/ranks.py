"""Compare an engine of one rank with all threads to one of several ranks with fewer threads.

    python -m benchmarks.ranks [--model M] [--ranks 2] [--stages 1] [--batch 48] [--rounds 3]

Each round runs both in turn: `--batch` greedy requests at once, of 64 prompt and 64 output tokens.
It prints output tokens/s and, for several ranks, the seconds that rank 0 spent on communication:
summing layers, gathering tokens, and messages. Without `--model`, the model is SmolLM2 with random
weights, 8 query heads and 4 KV heads, because two ranks cannot share SmolLM2's 9 and 3.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.common import logging
from octavo.common.shutdown import exit_at_once
from octavo.engine.core import EngineCore
from octavo.engine.metrics import EngineMetrics
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.parallel.processes import started_ranks
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts, build
from octavo.kernels import cpu

PROMPT_TOKENS = OUTPUT_TOKENS = 64
WARM_UP_TOKENS = 4


def main() -> None:
    """Run all rounds or, in a child process, one configuration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="default: a random model of SmolLM2's size")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="of these ranks")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--alone", action="store_true", help="one run with --ranks ranks")
    args = parser.parse_args()
    if args.alone:
        run(args)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = save_model(folder)
        compare(args)


def save_model(folder: str) -> str:
    """Save SmolLM2 with 8 query heads, 4 KV heads and random weights; return its folder."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = AutoConfig.from_pretrained(resolve("demo"), **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def compare(args: argparse.Namespace) -> None:
    """Run each configuration in each round, and print the medians."""
    # Several ranks first: a model whose heads cannot be divided fails at once.
    rates_by_ranks: dict[int, list[float]] = {args.ranks: [], 1: []}
    for _ in range(args.rounds):
        for ranks, rates in rates_by_ranks.items():
            result = in_process(args, ranks)
            rates.append(result["tokens_per_second"])
            print(json.dumps({"ranks": ranks} | result), flush=True)
    several, one = (statistics.median(rates) for rates in rates_by_ranks.values())
    print(f"medians: 1 rank {one:.1f}, {args.ranks} ranks {several:.1f}: {several / one:.2f}")


def in_process(args: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Run one configuration in a child process; return its measurement."""
    options = ["--model", args.model, "--dtype", args.dtype, "--batch", str(args.batch)]
    options += ["--quantization", args.quantization, "--compile", args.compile]
    stages = args.stages if ranks > 1 else 1
    options += ["--ranks", str(ranks), "--stages", str(stages), "--alone"]
    command = [sys.executable, "-m", "benchmarks.ranks", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(args: argparse.Namespace) -> None:
    """Measure one configuration, print it and end the process."""
    logging.configure(log_level="error")
    settings = EngineSettings(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        compile=args.compile,
        swap_space=0,
        num_blocks=args.batch * (PROMPT_TOKENS + OUTPUT_TOKENS) // 8,
        enable_prefix_caching=False,
        tensor_parallel_size=args.ranks // args.stages,
        pipeline_parallel_size=args.stages,
    )
    text = settings.model_dump_json(exclude_unset=True)
    with started_ranks(args.ranks, text) as (place, processes):
        parts = build(settings, place)
        cpu.pin_threads(parts.threads.places)  # as in an engine
        core = EngineCore(
            parts.scheduler, parts.executor, EngineMetrics(), lambda *_: None, max_waiting=1 << 20
        )
        compute(core, args.batch, WARM_UP_TOKENS)
        before = _times(parts)
        began = time.perf_counter()
        steps = compute(core, args.batch, OUTPUT_TOKENS)
        seconds = time.perf_counter() - began
        result = {
            "tokens_per_second": round(args.batch * OUTPUT_TOKENS / seconds, 1),
            "seconds": round(seconds, 2),
            "steps": steps,
            "compiled": parts.executor.compiled,
        }
        after = _times(parts)
        result |= {name: round(after[name] - before[name], 2) for name in after}
        print(json.dumps(result), flush=True)
        if parts.leader is not None and processes is not None:
            processes.begin_to_stop()
            parts.leader.stop()
    exit_at_once(os.EX_OK)


def _times(parts: Parts) -> dict[str, float]:
    """Return the seconds that rank 0 has spent on communication."""
    return {} if parts.leader is None else asdict(parts.leader.world.times)


def compute(core: EngineCore, batch: int, output_tokens: int) -> int:
    """Run requests to their end; return the number of steps."""
    for i in range(batch):
        prompt = tuple(1 + (7 * i + 13 * j) % 997 for j in range(PROMPT_TOKENS))
        greedy = SamplingParams(temperature=0.0)
        core.requests.submit(Request(0, str(i), prompt, greedy, output_tokens, time.monotonic()))
    steps = 0
    while core.working:
        core.step()
        steps += 1
    return steps


if __name__ == "__main__":
    main()
