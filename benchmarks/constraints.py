"""What constraints cost: throughput in a batch and alone, and the first token of a large schema.

    python -m benchmarks.constraints [--model demo] [--batch 48] [--rounds 3] [--vllm]

Outputs are greedy and equally long, so that runs with and without constraints compute the same
number of tokens. Runs take turns, and each round is printed when it is measured. The schema
describes an order of a shop, of the kind that applications send. Large ones have 20 KB. `--vllm`
runs the same requests on vLLM, whose environment `benchmarks.peers` makes.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from operator import truediv
from pathlib import Path
from typing import TypeAlias

from benchmarks.one_engine import OneEngine
from benchmarks.peers import environments, registry
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.peers.workers.protocol import Request, Setup
from benchmarks.report import percentiles
from octavo.common.models import resolve as models
from octavo.common.models.tokenizer import load_tokenizer

Asked: TypeAlias = tuple[list[int], str | None]
"""A request's tokens, and the schema of its output."""

BENCHMARKS = Path(__file__).parent
PATIENCE = 600.0
"""Seconds that each answer of another process may take."""
LARGE_BYTES = 20_000
MAX_MODEL_LEN = 2048
SINGLE_REPEATS = 3
"""Times that a round runs one request alone, in turn with and without a constraint."""
TOKENS = 96
"""Output tokens of each request."""
TEXT = {"type": "string", "minLength": 1, "maxLength": 60}
ORDER = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^ORD-[0-9]{6}$"},
        "placed": {"type": "string", "format": "date-time"},
        "status": {"enum": ["placed", "paid", "shipped", "delivered", "returned"]},
        "customer": {
            "type": "object",
            "properties": {
                "name": TEXT,
                "email": {"type": "string", "format": "email"},
                "phone": {"anyOf": [TEXT, {"type": "null"}]},
                "address": {"$ref": "#/$defs/address"},
            },
            "required": ["name", "email", "address"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": TEXT,
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number", "minimum": 0},
                    "tags": {"type": "array", "items": TEXT, "maxItems": 5},
                },
                "required": ["sku", "quantity", "price", "tags"],
                "additionalProperties": False,
            },
            "minItems": 20,
        },
        "note": TEXT,
    },
    "required": ["order_id", "placed", "status", "customer", "items"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"street": TEXT, "city": TEXT, "zip": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        }
    },
}


def large_schema(size: int, first: int = 0) -> str:
    """Return a schema of about `size` bytes: sections under different names, from a number on."""
    properties: dict[str, object] = {}
    while len(json.dumps({"type": "object", "properties": properties})) < size:
        number = first + len(properties)
        properties[f"section_{number}"] = {
            "type": "object",
            "description": f"What is known of section {number}, as its department wrote it down.",
            "properties": {
                f"title_{number}": TEXT,
                f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 10 * number + 9},
                f"kind_{number}": {"enum": [f"kind {number}.{i}" for i in range(8)]},
            },
            "required": [f"title_{number}", f"kind_{number}"],
            "additionalProperties": False,
        }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return json.dumps(schema | {"required": list(properties)})


def prompts(model: str, count: int) -> list[list[int]]:
    """Return the tokens of requests for orders."""
    tokenizer = load_tokenizer(Path(model))

    def tokens(number: int) -> list[int]:
        text = f"Write order {number} of the shop, with twenty items, as JSON."
        chat = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])

    return [tokens(number) for number in range(count)]


class Octavo:
    """An engine of Octavo in this process.

    Args:
        model: The model's directory.
    """

    name = "octavo"

    def __init__(self, model: str) -> None:
        self.engine = OneEngine(
            model,
            pin=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=256,
            enable_prefix_caching=False,
        )

    def run(self, asked: Sequence[Asked]) -> float:
        """Return the seconds that requests take that are submitted at once."""
        began = time.perf_counter()
        ids = [
            self.engine.submit(
                *((None,) if schema is None else ("json_schema", schema)),
                prompt=tokens,
                temperature=0.0,
                max_tokens=TOKENS,
                **({"eos_token_ids": frozenset()} if schema is None else {}),
            )
            for tokens, schema in asked
        ]
        made = sum(len(self.engine.wait(request_id, 600).tokens[0]) for request_id in ids)
        seconds = time.perf_counter() - began
        assert made == TOKENS * len(asked), f"{made} tokens: an output has ended early"
        return seconds

    def close(self) -> None:
        """Stop the engine; check that it has kept nothing."""
        self.engine.settle()
        self.engine.close()


class Vllm:
    """vLLM in a process of its own, stopped while it is not measured.

    Args:
        model: The model's directory.
    """

    name = "vllm"

    def __init__(self, model: str) -> None:
        folder = registry.default_folder()
        python = environments.provide(registry.VLLM, folder)
        variables = {"PYTHONPATH": str(BENCHMARKS), "OMP_NUM_THREADS": str(os.cpu_count())}
        command = [str(python), "-P", "-m", "peers.workers.vllm"]
        log = folder / "vllm-constraints.log"
        self._worker = WorkerProcess(command, variables, log, PATIENCE)
        versions = self._worker.load(Setup(model, os.cpu_count() or 1, 1.0))
        print(f"vllm: {versions}", flush=True)
        self._worker.pause()

    def run(self, asked: Sequence[Asked]) -> float:
        """Return the seconds that requests take that are handed over at once."""
        requests = [Request(tokens, TOKENS, schema or "") for tokens, schema in asked]
        self._worker.resume()
        outcome = self._worker.run(requests)
        self._worker.pause()
        return outcome.seconds

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def measure_rates(peers: Sequence[Octavo | Vllm], model: str, batch: int, rounds: int) -> None:
    """Print the output tokens per second with and without constraints, in rounds."""
    schema = json.dumps(ORDER)
    asked = prompts(model, batch)
    cases = {
        (batch, 0): "free",
        (batch, batch // 2): "half constrained",
        (1, 0): "free",
        (1, 1): "constrained",
    }
    found: dict[tuple[str, int, int], list[float]] = {}
    for number, peer, size in itertools.product(range(rounds + 1), peers, (batch, 1)):
        seconds = dict.fromkeys((case for case in cases if case[0] == size), 0.0)
        repeats = 1 if size > 1 or not number else SINGLE_REPEATS
        order = list(seconds)[:: -1 if number % 2 else 1]
        for _, case in itertools.product(range(repeats), order):
            requests = [
                (tokens, schema if i < case[1] else None) for i, tokens in enumerate(asked[:size])
            ]
            seconds[case] += peer.run(requests)
        if not number:  # the first round warms up
            continue
        for (_, constrained), took in seconds.items():
            speeds = found.setdefault((peer.name, size, constrained), [])
            speeds.append(repeats * size * TOKENS / took)
            shown = f"round {number} {peer.name:6} batch {size:2} {cases[size, constrained]:16}"
            print(f"{shown} {speeds[-1]:7.1f} tokens/s", flush=True)
    for (peer_name, size, constrained), speeds in found.items():
        free = found[peer_name, size, 0]
        ours = found[Octavo.name, size, constrained]
        ratio = statistics.median(map(truediv, speeds, free))
        beside = statistics.median(map(truediv, ours, speeds))
        print(
            f"{peer_name:6} batch {size:2} {cases[size, constrained]:16} median "
            f"{statistics.median(speeds):7.1f} tokens/s, of its free {ratio:.3f}"
            + (f"; octavo is {beside:.2f} times as fast" if peer_name != Octavo.name else "")
        )


def measure_first_tokens(engine: OneEngine, tokens: Sequence[int], rounds: int) -> None:
    """Print the first-token delay of a large schema, and what it costs a stream beside it."""
    small = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    delay = 1e3 * _delay(engine, tokens, small)
    print(f"first token, alone, the first constraint of an engine: {delay:.0f} ms")
    for request_id in [engine.submit("regex", f"a{{{i + 1}}}") for i in range(8)]:
        engine.wait(request_id)  # on all threads that compile
    for number in range(rounds):
        schema = large_schema(LARGE_BYTES, number)
        for name, text in ((None, None), ("first", schema), ("again", schema)):
            shown = "free" if name is None else f"{len(schema)} bytes, {name} time"
            delay = 1e3 * _delay(engine, tokens, text)
            print(f"first token, alone, {shown}: {delay:.1f} ms", flush=True)
    calm, hit = list[float](), list[float]()
    for number in range(rounds):
        for gaps, schemas in (
            (calm, []),
            (hit, [large_schema(LARGE_BYTES, rounds + 10 * number + i) for i in range(4)]),
        ):
            neighbour = engine.submit(
                None, prompt=tokens, temperature=0.0, max_tokens=200, eos_token_ids=frozenset()
            )
            for schema in schemas:
                _delay(engine, tokens, schema)
            times = engine.wait(neighbour).times
            gaps += [late - early for early, late in pairwise(times)]
    for name, gaps in (("alone", calm), ("beside 4 schemas that compile", hit)):
        median, slow, most = percentiles(gaps)
        shown = f"median {median:.2f}, p99 {slow:.2f}, max {most:.2f}"
        print(f"a stream {name}: ms between tokens: {shown}", flush=True)


def _delay(engine: OneEngine, tokens: Sequence[int], schema: str | None) -> float:
    """Return the seconds to a request's first token."""
    began = time.perf_counter()
    kind = (None,) if schema is None else ("json_schema", schema)
    ended = engine.run(*kind, prompt=tokens, temperature=0.0, max_tokens=2)
    return ended.times[0] - began


def measure(model: str, batch: int, rounds: int, *, vllm: bool) -> None:
    """Measure and print."""
    directory = str(models.resolve(model))
    octavo = Octavo(directory)
    peers: list[Octavo | Vllm] = [octavo]
    try:
        measure_first_tokens(octavo.engine, prompts(directory, 1)[0], rounds)
        if vllm:
            peers.append(Vllm(directory))
        measure_rates(peers, directory, batch, rounds)
    finally:
        for peer in peers:
            peer.close()


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM beside it")
    measure(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
