"""Compare llguidance and xgrammar: how long schemas take to compile, and masks to compute.

    pip install xgrammar
    python -m benchmarks.constraint_libraries [--model demo]

Both follow the same document token by token, with the model's own tokenizer, in one thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.constraints import ORDER, large_schema
from octavo.common.models import resolve as models
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.tokens import read_tokens

CUSTOMER = {"name": "Ann", "email": "ann@example.org", "address": {"street": "1 A St", "city": "B"}}
ITEM = {"sku": "pencil, red", "quantity": 12, "price": 1.25, "tags": ["office", "red"]}
DOCUMENT = {
    "order_id": "ORD-123456",
    "placed": "2026-01-02T03:04:05Z",
    "status": "paid",
    "customer": CUSTOMER,
    "items": [ITEM] * 20,
}


class Follower(Protocol):
    """A place in a grammar."""

    def mask(self) -> None:
        """Compute the mask of the next token."""

    def read(self, token_id: int) -> bool:
        """Read a token; return whether the grammar allows it."""


class Guidance:
    """A place in a grammar of llguidance."""

    def __init__(self, schema: str, tokens: Any) -> None:  # noqa: ANN401
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, (schema,))
        self._matcher = compile_grammar(constraint, tokens)
        self._mask = np.empty((tokens.vocab_size + 31) // 32, np.int32)

    def mask(self) -> None:
        """Compute the mask of the next token."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def read(self, token_id: int) -> bool:
        """Read a token; return whether the grammar allows it."""
        return self._matcher.consume_token(token_id)


class XGrammar:
    """A place in a grammar of xgrammar."""

    def __init__(self, schema: str, compiler: Any) -> None:  # noqa: ANN401
        library = import_module("xgrammar")
        compiled = compiler.compile_json_schema(schema, any_whitespace=True)
        self._matcher = library.GrammarMatcher(compiled)
        self._mask: torch.Tensor = library.allocate_token_bitmask(1, 1 << 17)

    def mask(self) -> None:
        """Compute the mask of the next token."""
        self._matcher.fill_next_token_bitmask(self._mask)

    def read(self, token_id: int) -> bool:
        """Read a token; return whether the grammar allows it."""
        return bool(self._matcher.accept_token(token_id))


def follow(make: Callable[[], Follower], token_ids: Sequence[int]) -> tuple[float, list[float]]:
    """Return the seconds to compile, and those of each mask."""
    began = time.perf_counter()
    follower = make()
    compiling = time.perf_counter() - began
    masks = []
    for token_id in token_ids:
        began = time.perf_counter()
        follower.mask()
        masks.append(time.perf_counter() - began)
        assert follower.read(token_id), "the document does not keep to the schema"
    return compiling, masks


def large_document(schema: str) -> str:
    """Return a document of `large_schema`."""
    parts = json.loads(schema)["properties"]
    document = {}
    for name, part in parts.items():
        number = name.rpartition("_")[2]
        assert part["type"] == "object"
        document[name] = {
            f"title_{number}": f"Section {number} of the report",
            f"count_{number}": 7,
            f"kind_{number}": f"kind {number}.3",
        }
    return json.dumps(document)


def measure(model: str) -> None:
    """Measure and print."""
    directory = str(models.resolve(model))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    size, eos = len(tokenizer), tokenizer.eos_token_id
    tokens = read_tokens(Path(directory), size, [eos]).build()
    library = import_module("xgrammar")
    info = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=[eos])
    large = large_schema(20_000)
    cases = {
        "order": (json.dumps(ORDER), json.dumps(DOCUMENT)),
        "20 KB": (large, large_document(large)),
    }
    for name, (schema, document) in cases.items():
        ids = tokenizer(document, add_special_tokens=False)["input_ids"]
        makers: dict[str, Callable[[], Follower]] = {
            "llguidance": lambda schema=schema: Guidance(schema, tokens),
            "xgrammar": lambda schema=schema: XGrammar(
                schema, library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            ),
        }
        for library_name, make in makers.items():
            rounds = [follow(make, ids) for _ in range(3)]
            compiling = statistics.median(seconds for seconds, _ in rounds)
            masks = [1e6 * seconds for _, each in rounds for seconds in each]
            print(
                f"{name:6} {library_name:11} compile {1e3 * compiling:8.1f} ms; masks, us: mean "
                f"{statistics.mean(masks):6.1f}, median {statistics.median(masks):6.1f}, "
                f"max {max(masks):8.1f}; {len(ids)} tokens"
            )


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    measure(parser.parse_args().model)


if __name__ == "__main__":
    main()
