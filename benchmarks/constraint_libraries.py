"""Compare llguidance and xgrammar: speed, what they enforce, what they do with hostile schemas.

    python -m benchmarks.constraint_libraries [--model demo]

Both follow the same documents token by token, with the model's own tokenizer, in one thread. Then
they compile the schemas of the official suite, and are shown its documents. Last they compile
hostile constraints, each in a fork with limits. xgrammar is installed into the cache directory.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from benchmarks.constraints import ORDER, large_schema
from benchmarks.hostile_constraints import hostile
from benchmarks.peers import registry
from benchmarks.schema_suite import download_suite
from octavo.common.models import resolve as models
from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.constraints.constraint import Constraint, ConstraintError, ConstraintKind
from octavo.engine.constraints.grammar import compile_grammar, schemas
from octavo.engine.constraints.json_schema import unenforceable
from octavo.engine.constraints.tokens import read_tokens

Encode: TypeAlias = Callable[[str], list[int]]

XGRAMMAR = ("xgrammar==0.2.8", "apache-tvm-ffi==0.1.15.post2")
ROUNDS = 3
CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30
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
    """A place in a grammar of llguidance.

    Args:
        matcher: The place.
        size: Number of tokens.
    """

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._mask = np.empty((size + 31) // 32, np.int32)

    def mask(self) -> None:
        """Compute the mask of the next token."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def read(self, token_id: int) -> bool:
        """Read a token; return whether the grammar allows it."""
        return self._matcher.consume_token(token_id)


class XGrammar:
    """A place in a grammar of xgrammar.

    Args:
        compiled: The grammar.
        size: Number of tokens.
    """

    def __init__(self, compiled: Any, size: int) -> None:  # noqa: ANN401
        library = import_module("xgrammar")
        self._matcher = library.GrammarMatcher(compiled)
        self._mask: torch.Tensor = library.allocate_token_bitmask(1, size)

    def mask(self) -> None:
        """Compute the mask of the next token."""
        self._matcher.fill_next_token_bitmask(self._mask)

    def read(self, token_id: int) -> bool:
        """Read a token; return whether the grammar allows it."""
        return bool(self._matcher.accept_token(token_id))


class Library(Protocol):
    """A library with the model's tokens."""

    name: str

    def compile(self, kind: str, text: str) -> Follower:
        """Return the beginning of a constraint; what is wrong with it is an exception."""


class LlGuidance:
    """llguidance, as Octavo uses it.

    Args:
        tokens: The model's tokens.
    """

    name = "llguidance"

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens

    def compile(self, kind: str, text: str) -> Follower:
        """Return the beginning of a constraint, checked as Octavo does."""
        constraint = Constraint(ConstraintKind(kind), (text,))
        for schema in schemas(constraint):
            if (why := unenforceable(schema)) is not None:
                raise ConstraintError(why)
        return Guidance(compile_grammar(constraint, self._tokens), self._tokens.vocab_size)


class Xgrammar:
    """xgrammar with one thread and no cache.

    Args:
        tokenizer: The model's tokenizer.
        eos: The token that ends an output.
    """

    name = "xgrammar"

    def __init__(self, tokenizer: Any, eos: int) -> None:  # noqa: ANN401
        library = import_module("xgrammar")
        self._size = len(tokenizer)
        info = library.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self._size, stop_token_ids=[eos]
        )
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, text: str) -> Follower:
        """Return the beginning of a constraint; properties that are not named are allowed."""
        if kind == "json_schema":
            compiled = self._compiler.compile_json_schema(text, strict_mode=False)
        else:
            compiled = self._compiler.compile_regex(text)
        return XGrammar(compiled, self._size)


def install_xgrammar() -> None:
    """Make xgrammar importable, without what this environment has already."""
    folder = registry.default_folder() / "-".join(["xgrammar", *XGRAMMAR]).replace("=", "")
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*install, str(unfinished), *XGRAMMAR], check=True)
        unfinished.rename(folder)
    sys.path.append(str(folder))


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


def measure_speed(libraries: Sequence[Library], encode: Encode) -> None:
    """Print the times of compiling and of masks."""
    large = large_schema(20_000)
    cases = {
        "order": (json.dumps(ORDER), json.dumps(DOCUMENT)),
        "20 KB": (large, large_document(large)),
    }
    for (name, (schema, document)), library in product(cases.items(), libraries):
        ids = encode(document)
        rounds = [
            follow(partial(library.compile, "json_schema", schema), ids) for _ in range(ROUNDS)
        ]
        compiling = statistics.median(seconds for seconds, _ in rounds)
        masks = [1e6 * seconds for _, each in rounds for seconds in each]
        print(
            f"{name:6} {library.name:11} compile {1e3 * compiling:8.1f} ms; masks, us: mean "
            f"{statistics.mean(masks):6.1f}, median {statistics.median(masks):6.1f}, "
            f"p99 {np.percentile(masks, 99):7.1f}, max {max(masks):8.1f}; {len(ids)} tokens",
            flush=True,
        )


def measure_rightness(libraries: Sequence[Library], encode: Encode, eos: int) -> None:
    """Print how many documents of the official suite are judged as they should be."""
    with tempfile.TemporaryDirectory() as directory:
        suite = download_suite(Path(directory))
    for library in libraries:
        counts: Counter[str] = Counter()
        for group in suite:
            schema = json.dumps(group["schema"])
            outcome = in_fork(partial(_judge, library, schema, group["tests"], encode, eos))
            counts["schemas"] += 1
            if isinstance(outcome, str):
                counts[outcome] += 1
                continue
            counts["served"] += 1
            for test, allowed in zip(group["tests"], outcome, strict=True):
                counts[f"{'valid' if test['valid'] else 'wrong'} documents"] += 1
                counts[f"{'valid' if test['valid'] else 'wrong'} allowed"] += allowed
        print(f"official suite, {library.name}: {dict(counts)}", flush=True)


def _judge(
    library: Library, schema: str, tests: Sequence[dict[str, Any]], encode: Encode, eos: int
) -> list[bool]:
    """Return which documents a schema's grammar allows."""
    return [
        _reads(library.compile("json_schema", schema), [*encode(_document(test)), eos])
        for test in tests
    ]


def _document(test: dict[str, Any]) -> str:
    return json.dumps(test["data"], ensure_ascii=False)


def _reads(follower: Follower, token_ids: Sequence[int]) -> bool:
    return all(map(follower.read, token_ids))


def measure_hostile(libraries: Sequence[Library], count: int) -> None:
    """Print what comes of hostile constraints of the kinds that both libraries have."""
    draw = random.Random(0)
    made = [each for each in (hostile(draw) for _ in range(3 * count)) if each[0] != "grammar"]
    for library in libraries:
        counts: Counter[str] = Counter()
        for kind, text in made[:count]:
            outcome = in_fork(partial(_compile_and_mask, library, kind, text))
            counts[outcome if isinstance(outcome, str) else "compiled"] += 1
        print(f"{count} hostile constraints, {library.name}: {dict(counts)}", flush=True)


def _compile_and_mask(library: Library, kind: str, text: str) -> list[bool]:
    library.compile(kind, text).mask()
    return []


def in_fork(work: Callable[[], list[bool]]) -> list[bool] | str:
    """Return what some work returns in a fork with limits, or how it ends otherwise."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = int(time.process_time() + CPU_SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os.write(writing, bytes([1, *work()]))
        except MemoryError:
            os.write(writing, bytes([2]))
        except BaseException:  # noqa: BLE001 - each library raises its own
            os.write(writing, bytes([0]))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    if not outcome:
        code = os.waitstatus_to_exitcode(status)
        timed_out = -code in {signal.SIGXCPU, signal.SIGKILL}
        return f"more than {CPU_SECONDS} s" if timed_out else "ended the process"
    if outcome[0] != 1:
        return "refused" if outcome[0] == 0 else "out of memory"
    return [bool(allowed) for allowed in outcome[1:]]


def measure(model: str, hostile_count: int) -> None:
    """Measure and print."""
    install_xgrammar()
    directory = str(models.resolve(model))
    tokenizer = load_tokenizer(Path(directory))
    size, eos = len(tokenizer), tokenizer.eos_token_id
    tokens = read_tokens(Path(directory), size, [eos]).build()
    libraries: list[Library] = [LlGuidance(tokens), Xgrammar(tokenizer, eos)]
    print(f"llguidance {version('llguidance')}, {XGRAMMAR[0]}", flush=True)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    measure_speed(libraries, encode)
    measure_rightness(libraries, encode, eos)
    measure_hostile(libraries, hostile_count)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--hostile", type=int, default=100, help="number of hostile constraints")
    arguments = parser.parse_args()
    measure(arguments.model, arguments.hostile)


if __name__ == "__main__":
    main()
