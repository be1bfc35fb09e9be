"""Time outputs with drafted tokens and without, in one engine, turn by turn.

    python -m benchmarks.speculation [--model demo] [--quantization none] [--rounds 2]
        [--modes off ngram suffix auto] [--kinds copy edit summary json code schema open mix]
        [--tokens 8]

Each prompt is answered under every mode in turn, so that the machine is the same for all. The kinds
`copy`, `edit`, `summary`, `json` and `code` have the text in the prompt that the answer is made of,
and are greedy; `schema` is as `json`, and held to a JSON schema. `open` text is sampled with a seed
at temperature 0.8. These are one request at a time. `mix` is 48 requests at once, of all kinds. No
prefix is cached, and every round has a salt of its own, so that nothing is drafted from the outputs
of another round. Tokens per second are of whole requests, prefill included. The last column counts
the outputs that are the same, token for token, as without drafts: in 16 bits, rounding may choose
between two tokens that are nearly as likely, and steps of several tokens round otherwise than steps
of one.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.one_engine import OneEngine
from octavo.common.models.resolve import resolve
from octavo.common.models.tokenizer import load_tokenizer
from octavo.engine.speculation.methods import make_speculation

TEXTS = (
    """The harbour of Lindau lies on an island in the eastern part of the lake. Its entrance is
guarded by a lighthouse of 33 metres and by a marble lion. The lighthouse was built between 1853 and
1856, when the railway reached the island. Until then, ships found the harbour by the light of the
old Mang tower, which still stands at the quay. Today the harbour serves ferries and sailing boats,
and some two million visitors come every year.""",
    """Dear Ms. Okafor, thank you for your order of 24 April. The two oak shelves left our warehouse
in Leeds on Monday and will reach you by Thursday afternoon. The desk lamp is out of stock until the
middle of May; we have refunded its price of 48 pounds to your card. Please check the parcels for
damage before you sign for them. If anything is missing, write to us within seven days and we will
send a replacement. With kind regards, Peter Hale, customer service.""",
    """A heat pump moves heat from a cold place to a warm one. A compressor presses a refrigerant
until it is hot. The hot gas gives its heat to the water of the heating system and becomes liquid.
An expansion valve lowers the pressure, the liquid becomes cold, and it takes up heat from the air
outside. For each kilowatt hour of electricity, a good heat pump delivers three to four kilowatt
hours of heat. On very cold days it delivers less, as it must pump the heat further up.""",
)
RECORDS = (
    """name: Ada Lovelace, born: 1815, field: mathematics, city: London
name: Emmy Noether, born: 1882, field: algebra, city: Erlangen
name: Grace Hopper, born: 1906, field: computing, city: New York""",
    """item: bread, price: 3.20, count: 2, aisle: bakery
item: milk, price: 1.15, count: 6, aisle: dairy
item: apples, price: 2.80, count: 1, aisle: fruit""",
)
CODE = (
    """def moving_average(values, size):
    total = 0.0
    result = []
    for index, value in enumerate(values):
        total += value
        if index >= size:
            total -= values[index - size]
        if index >= size - 1:
            result.append(total / size)
    return result""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        return self.items[-1]""",
)
TASKS = {
    "copy": "Repeat the following text word for word.",
    "edit": "Rewrite the following text. Change its first number to 77, and keep every other word.",
    "summary": "Summarize the following text.",
}
PROMPTS = {
    kind: [f"{task}\n\n{text.replace(chr(10), ' ')}" for text in TEXTS]
    for kind, task in TASKS.items()
} | {
    "json": [
        f"Write these records as a JSON list of objects with the same keys and values.\n\n{records}"
        for records in RECORDS
    ],
    "code": [
        f"Add a docstring to this Python code, and change nothing else.\n\n```python\n{code}\n```"
        for code in CODE
    ],
    "schema": [
        f"Write these records as a JSON list of objects with the same keys and values.\n\n{records}"
        for records in RECORDS
    ],
    "open": [
        "Write a story about a lighthouse keeper who finds a letter.",
        "Explain why the sky is blue.",
        "What should I see in Rome in two days?",
        "Give me advice on how to learn to play the piano as an adult.",
    ],
}
COLUMNS = (("name", "born", "field", "city"), ("item", "price", "count", "aisle"))
NUMBERS = {"born", "price", "count"}
SCHEMAS = [
    json.dumps(
        {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    name: {"type": "number"} if name in NUMBERS else {"type": "string"}
                    for name in names
                },
                "required": list(names),
                "additionalProperties": False,
            },
        }
    )
    for names in COLUMNS
]
"""Of `schema`: those of `RECORDS`."""
MIX = 48
MAX_TOKENS = 160


@dataclass
class Figures:
    """The measurements of one kind of work with one value of `--speculation`.

    Attributes:
        tokens: of outputs.
        seconds: that they took.
        processor_seconds: of all threads; where others use the machine, it varies less.
        drafted: drafted tokens.
        accepted: of these, those that were right.
        same: outputs that are those without drafts.
        outputs: outputs.
    """

    tokens: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    same: int = 0
    outputs: int = 0


class Benchmark:
    """An engine, and what was measured with it by kind and mode."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = resolve(options.model)
        self.options = options
        self.engine = OneEngine(
            model,
            pin=True,
            quantization=options.quantization,
            dtype=options.dtype,
            compile=options.compile,
            enable_prefix_caching=False,
        )
        self.figures: dict[str, dict[str, Figures]] = defaultdict(lambda: defaultdict(Figures))
        self._speculations = {
            mode: make_speculation(mode, options.tokens) for mode in options.modes
        }
        tokenizer = load_tokenizer(Path(model))
        self.prompts: dict[str, list[list[int]]] = {
            kind: [
                tokenizer(
                    tokenizer.apply_chat_template(
                        [{"role": "user", "content": text}],
                        add_generation_prompt=True,
                        tokenize=False,
                    )
                ).input_ids
                for text in texts
            ]
            for kind, texts in PROMPTS.items()
        }

    def groups(self, kind: str) -> list[list[tuple[list[int], dict[str, Any]]]]:
        """Return the prompts of a kind with their parameters, by those that run at once."""

        def asked(kind: str, i: int) -> tuple[list[int], dict[str, Any]]:
            sampled: dict[str, Any] = {"temperature": 0.0}
            if kind == "open":
                sampled = {"temperature": 0.8, "seed": i}
            if kind == "schema":
                sampled["schema"] = SCHEMAS[i % len(SCHEMAS)]
            return self.prompts[kind][i % len(self.prompts[kind])], sampled

        if kind != "mix":
            return [[asked(kind, i)] for i in range(len(self.prompts[kind]))]
        kinds = list(self.prompts)
        return [[asked(kinds[i % len(kinds)], i // len(kinds)) for i in range(MIX)]]

    def run(self, round_: int) -> None:
        """Answer every prompt once under each mode."""
        for kind in self.options.kinds:
            for group in self.groups(kind):
                plain: list[list[int]] | None = None
                for mode in self.options.modes:
                    outputs = self._answer(kind, mode, group, str(round_))
                    if plain is None:
                        plain = outputs
                    figures = self.figures[kind][mode]
                    figures.outputs += len(group)
                    pairs = zip(outputs, plain, strict=True)
                    figures.same += sum(mine == theirs for mine, theirs in pairs)

    def _answer(
        self, kind: str, mode: str, group: list[tuple[list[int], dict[str, Any]]], salt: str
    ) -> list[list[int]]:
        scheduler, figures = self.engine.parts.scheduler, self.figures[kind][mode]
        scheduler.speculation = self._speculations[mode]
        drafted, accepted = scheduler.counters.drafted_tokens, scheduler.counters.accepted_tokens
        began, processor = time.perf_counter(), time.process_time()
        ids = [self._submit(prompt, cache_salt=salt, **sampled) for prompt, sampled in group]
        outputs = [self.engine.wait(id_).tokens[0] for id_ in ids]
        figures.seconds += time.perf_counter() - began
        figures.processor_seconds += time.process_time() - processor
        figures.tokens += sum(map(len, outputs))
        figures.drafted += scheduler.counters.drafted_tokens - drafted
        figures.accepted += scheduler.counters.accepted_tokens - accepted
        self.engine.settle()
        return outputs

    def _submit(self, prompt: list[int], *, schema: str | None = None, **more: Any) -> str:  # noqa: ANN401
        constraint = (None,) if schema is None else ("json_schema", schema)
        return self.engine.submit(*constraint, prompt=prompt, max_tokens=MAX_TOKENS, **more)


def report(figures: dict[str, dict[str, Figures]], modes: list[str]) -> None:
    """Print a line for each kind and mode."""
    print(
        f"{'kind':<9}{'mode':<8}{'tokens/s':>9}{'of off':>8}{'CPU ms/token':>14}{'of off':>8}"
        f"{'drafted':>9}{'right':>7}{'same':>8}"
    )
    for kind, by_mode in figures.items():
        off = by_mode[modes[0]]
        for mode in modes:
            found = by_mode[mode]
            rate = found.tokens / found.seconds
            cost = 1e3 * found.processor_seconds / found.tokens
            off_cost = 1e3 * off.processor_seconds / off.tokens
            right = f"{found.accepted / found.drafted:.0%}" if found.drafted else "-"
            print(
                f"{kind:<9}{mode:<8}{rate:9.1f}{rate / (off.tokens / off.seconds):7.2f}x"
                f"{cost:14.2f}{cost / off_cost:7.2f}x"
                f"{found.drafted:9}{right:>7}{found.same:>5}/{found.outputs}"
            )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="maximum drafted tokens per step")
    parser.add_argument("--modes", nargs="+", default=["off", "ngram", "suffix", "auto"])
    parser.add_argument("--kinds", nargs="+", default=[*PROMPTS, "mix"])
    options = parser.parse_args()
    benchmark = Benchmark(options)
    warm_up = benchmark.groups("open")[0]
    for mode in options.modes:
        benchmark._answer("open", mode, warm_up, "warm-up")  # noqa: SLF001 - its own
    benchmark.figures.clear()
    for round_ in range(options.rounds):
        benchmark.run(round_)
    report(benchmark.figures, options.modes)
    benchmark.engine.close()


if __name__ == "__main__":
    main()
