"""Serve a Llama, and compare with Hugging Face's `generate`: output tokens/s through gRPC.

    python -m benchmarks.gpu.serving [--model LLaMA-7B] [--outputs 2000]

Weights are random, lengths are like ShareGPT's, and all requests arrive at once: first with one
greedy output each, then with three sampled outputs (PagedAttention, Kwon et al. 2023, 6.2 and 6.3).
The table also shows `generate` at its best static batch size, and a lower bound of the time from
this device's measured copy and product rates. Results go to
`benchmarks/results/DEVICE-serving.json`, one entry per model. `--device cpu --tiny` tests the
benchmark itself.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fixture import save_tokenizer
from benchmarks.gpu.parts import measure_device
from benchmarks.gpu.random_model import save_llama, tiny_layout
from benchmarks.gpu.report import device_name, file_stem
from benchmarks.gpu.requests import Requests, make_requests
from benchmarks.gpu.serving_floor import Ceilings, floor_seconds
from benchmarks.gpu.shapes import LLAMA_7B, LLAMA_13B, Layout
from benchmarks.gpu.static_batches import StaticBatches
from benchmarks.gpu.timing import Timer
from octavo import AsyncClient
from octavo.cli.local_server import local_server
from octavo.engine.memory.cache_tensors import memory_of

MODELS = {layout.model: layout for layout in (LLAMA_7B, LLAMA_13B)}
RESULTS = Path(__file__).parents[1] / "results"
OUTPUTS = (1, 3)
"""Outputs per request."""
WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a measurement.

    Attributes:
        outputs: Total number of outputs.
        longest: Maximum tokens of a prompt, and of an output.
        static: Sizes of the static batches, in sequences.
        max_num_seqs: The engine's flag.
    """

    outputs: int
    longest: int
    static: tuple[int, ...]
    max_num_seqs: int


SIZES = Sizes(2000, 1024, static=(8, 16, 24, 32, 48), max_num_seqs=256)
TINY = Sizes(6, 12, static=(2, 4), max_num_seqs=4)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=LLAMA_7B.model, choices=list(MODELS))
    parser.add_argument(
        "--outputs", type=int, default=SIZES.outputs, help="outputs of all requests together"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes that do not measure speed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu --tiny tests the benchmark itself")
    device = torch.device(args.device)
    name = device_name(device)
    layout = tiny_layout(MODELS[args.model]) if args.tiny else MODELS[args.model]
    report = _measure(layout, device, TINY if args.tiny else replace(SIZES, outputs=args.outputs))
    _show(name, layout, report)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (file_stem(name) + "-serving.json")
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[layout.model] = {"date": datetime.now(UTC).date().isoformat()} | report
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _measure(layout: Layout, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Measure both; serving comes first, because `generate` leaves memory allocated."""
    copy, product = measure_device(Timer(device, runs=20), tiny=device.type == "cpu")
    ceilings = Ceilings(
        copy.moved / copy.seconds, product.flops / product.seconds, memory_of(device).total
    )
    wanted = [
        make_requests(sizes.outputs // n, n=n, vocab_size=layout.vocab_size, most=sizes.longest)
        for n in OUTPUTS
    ]
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        save_llama(layout, Path(folder), device)
        save_tokenizer(Path(folder))
        torch.cuda.empty_cache()
        flags = ["--device", device.type, "--dtype", "bfloat16", "--swap-space", "0"]
        flags += ["--max-num-seqs", str(sizes.max_num_seqs), "--no-enable-prefix-caching"]
        flags += ["--compile", "off"] if device.type == "cpu" else []
        with local_server(folder, *flags) as address:
            ours = [asyncio.run(_serve(address, requests)) for requests in wanted]
        static = StaticBatches(Path(folder), device)
        rates = {size: static.rate(wanted[0], size) for size in sizes.static}
        best = max(sizes.static, key=lambda size: rates[size] or 0)
        theirs = [rates, *({best: static.rate(requests, best)} for requests in wanted[1:])]
    rows = [
        {
            "n": requests.n,
            "tokens": requests.n * int(requests.outputs.sum()),
            "seconds": seconds,
            "floor": floor_seconds(
                layout, requests.prompts, requests.outputs, n=requests.n, ceilings=ceilings
            ),
            "generate": rates,
        }
        for requests, seconds, rates in zip(wanted, ours, theirs, strict=True)
    ]
    return {"torch": torch.__version__, **asdict(ceilings), "rows": rows}


async def _serve(address: str, requests: Requests) -> float:
    """Return the seconds from the first request to the last token.

    Raises:
        ArithmeticError: A request got fewer or more tokens than requested.
    """
    sampling = {"temperature": 1.0 if requests.n > 1 else 0.0, "n": requests.n}

    async def ask(client: AsyncClient, index: int) -> int:
        answer = await client.generate(
            requests.tokens[index],
            max_tokens=int(requests.outputs[index]),
            ignore_eos=True,
            final_only=True,
            token_ids=True,
            **sampling,  # type: ignore[arg-type]
        ).complete()
        return sum(len(output.token_ids) for output in answer.outputs)

    async with AsyncClient(address) as client:
        indices = range(len(requests.tokens))
        await asyncio.gather(*(ask(client, index) for index in indices[:WARM_UP]))
        began = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, index) for index in indices))
        seconds = time.perf_counter() - began
    if counts != (requests.n * requests.outputs).tolist():
        raise ArithmeticError("a request got more or fewer tokens than it asked for")
    return seconds


def _show(device: str, layout: Layout, report: dict[str, Any]) -> None:
    table = Table(
        *("outputs", "tokens/s", "of the roofline", "generate", "its batch", "times as many"),
        title=f"{layout.model} on {device}",
    )
    for row in report["rows"]:
        batch, best = max(row["generate"].items(), key=lambda item: item[1] or 0)
        rate = row["tokens"] / row["seconds"]
        table.add_row(
            str(row["n"]),
            f"{rate:,.0f}",
            f"{row['floor'] / row['seconds']:.0%}",
            f"{best:,.0f}",
            str(batch),
            f"{rate / best:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    sys.exit(main())
