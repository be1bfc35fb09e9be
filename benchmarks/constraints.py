"""What constraints cost: throughput in a batch and alone, and the first token of a large schema.

    python -m benchmarks.constraints [--model demo] [--batch 48] [--rounds 4]

Outputs are greedy and equally long, so that runs with and without constraints compute the same
number of tokens; runs take turns. The schema describes an order of a shop, of the kind that
applications send. The large one has 20 KB and is compiled once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from transformers import AutoTokenizer

from benchmarks.one_engine import OneEngine
from octavo.common.models import resolve as models

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


def large_schema(size: int) -> str:
    """Return a schema of about `size` bytes: many orders' fields under different names."""
    properties: dict[str, object] = {}
    while len(json.dumps({"type": "object", "properties": properties})) < size:
        number = len(properties)
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


def prompt(model: str, number: int) -> list[int]:
    """Return the tokens of a request for an order."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = f"Write order {number} of the shop, with twenty items, as JSON."
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])


def rate(engine: OneEngine, prompts: Sequence[Sequence[int]], constrained: int) -> float:
    """Return the output tokens per second of requests, the first of which are constrained."""
    schema = json.dumps(ORDER)
    began = time.perf_counter()
    ids = [
        engine.submit(
            *(("json_schema", schema) if i < constrained else (None,)),
            prompt=tokens,
            temperature=0.0,
            max_tokens=TOKENS,
            **({} if i < constrained else {"eos_token_ids": frozenset()}),
        )
        for i, tokens in enumerate(prompts)
    ]
    made = sum(len(engine.wait(request_id, 600).tokens[0]) for request_id in ids)
    seconds = time.perf_counter() - began
    assert made == TOKENS * len(prompts), f"{made} tokens: an output has ended early"
    return made / seconds


def first_token(engine: OneEngine, tokens: Sequence[int], schema: str | None) -> float:
    """Return the seconds to a request's first token."""
    began = time.perf_counter()
    kind = (None,) if schema is None else ("json_schema", schema)
    ended = engine.run(*kind, prompt=tokens, temperature=0.0, max_tokens=2)
    return ended.times[0] - began


def measure(model: str, batch: int, rounds: int) -> None:
    """Measure and print."""
    directory = str(models.resolve(model))
    engine = OneEngine(directory, compile="wait", max_model_len=2048, enable_prefix_caching=False)
    prompts = [prompt(directory, i) for i in range(batch)]
    cases = {
        f"batch {batch}, free": (prompts, 0),
        f"batch {batch}, half": (prompts, batch // 2),
        f"batch {batch}, all": (prompts, batch),
        "alone, free": (prompts[:1], 0),
        "alone, constrained": (prompts[:1], 1),
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (asked, constrained) in cases.items():
            speed = rate(engine, asked, constrained)
            if number:  # the first round warms up
                found[name].append(speed)
    for name, speeds in found.items():
        base = found[f"batch {batch}, free" if name.startswith("batch") else "alone, free"]
        ratios = [speed / free for speed, free in zip(speeds, base, strict=True)]
        shown = " ".join(f"{speed:.0f}" for speed in speeds)
        print(f"{name:20} tokens/s {shown}; of free: {statistics.median(ratios):.3f}")
    large = large_schema(20_000)
    for name, schema in (("free", None), ("20 KB, first", large), ("20 KB, again", large)):
        print(f"first token, {name:14} {1e3 * first_token(engine, prompts[0], schema):.1f} ms")
    engine.settle()
    engine.close()


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    measure(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
