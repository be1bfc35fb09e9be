"""Time outputs with and without drafted tokens, with one server per mode, in turn.

    python -m benchmarks.speculation [--model demo] [--rounds 2] [--modes off ngram suffix auto]
        [--kinds copy edit summary json code schema open mix] [--tokens 8] [-- FLAG ...]

Every mode answers each prompt in turn, so that conditions are equal. In the kinds `copy`, `edit`,
`summary`, `json` and `code`, the prompt holds the text of the answer, and sampling is greedy;
`schema` is `json` constrained by a JSON schema. `open` text is sampled with a seed at temperature
0.8. These kinds send one request at a time; `mix` sends 48 requests of all kinds at once. No prefix
is cached, and every round has its own salt, so that no draft comes from another round's outputs.
Tokens per second include prefill. The last column counts outputs with exactly the tokens of the
first mode: in 16 bits, rounding may decide between two nearly equally likely tokens, and steps of
several tokens round differently from steps of one.
"""

import argparse
import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import table
from octavo import AsyncClient, Completion, Message
from octavo.cli.local_server import local_server
from octavo.common.sampling_parameters import GenerateOptions

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
    for names in COLUMNS
]
"""The JSON schemas of `RECORDS`."""
MIX = 48
MAX_TOKENS = 160
Ask = tuple[str, GenerateOptions]
"""A prompt and its options."""


@dataclass
class Stats:
    """The measurements of one kind of work in one mode.

    Attributes:
        tokens: Output tokens.
        seconds: Seconds that they took.
        drafted: Drafted tokens.
        accepted: Drafted tokens that were right.
        same: Outputs equal to the first mode's.
        outputs: Outputs.
    """

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    same: int = 0
    outputs: int = 0

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


def groups(kind: str) -> list[list[Ask]]:
    """Return the requests of a kind, in groups that run at once."""

    def ask(kind: str, i: int) -> Ask:
        options: GenerateOptions = {"temperature": 0.0}
        if kind == "open":
            options = {"temperature": 0.8, "seed": i}
        if kind == "schema":
            options["json_schema"] = SCHEMAS[i % len(SCHEMAS)]
        return PROMPTS[kind][i % len(PROMPTS[kind])], options

    if kind != "mix":
        return [[ask(kind, i)] for i in range(len(PROMPTS[kind]))]
    kinds = list(PROMPTS)
    return [[ask(kinds[i % len(kinds)], i // len(kinds)) for i in range(MIX)]]


async def answer(client: AsyncClient, group: Sequence[Ask], salt: str) -> list[Completion]:
    """Send the requests of a group at once."""
    common: GenerateOptions = {"max_tokens": MAX_TOKENS, "token_ids": True, "cache_salt": salt}
    streams = [
        client.generate([Message("user", text)], **(common | options)) for text, options in group
    ]
    return await asyncio.gather(*(stream.complete() for stream in streams))


async def measure(
    addresses: dict[str, str], kinds: Sequence[str], rounds: int
) -> dict[str, dict[str, Stats]]:
    """Answer all prompts in each mode and round; return the measurements by kind and mode."""
    found: dict[str, dict[str, Stats]] = defaultdict(lambda: defaultdict(Stats))
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            mode: await stack.enter_async_context(AsyncClient(address))
            for mode, address in addresses.items()
        }
        for client in clients.values():
            await answer(client, groups("open")[0], "warm-up")
        for number in range(rounds):
            for kind in kinds:
                for group in groups(kind):
                    first: list[Completion] | None = None
                    for mode, client in clients.items():
                        began = time.perf_counter()
                        completions = await answer(client, group, str(number))
                        seconds = time.perf_counter() - began
                        first = first or completions
                        add(found[kind][mode], completions, first, seconds)
    return found


def add(
    stats: Stats, completions: list[Completion], first: list[Completion], seconds: float
) -> None:
    """Count the answers of a group."""
    stats.seconds += seconds
    for completion, other in zip(completions, first, strict=True):
        stats.tokens += completion.usage.output_tokens
        stats.drafted += completion.usage.drafted_tokens
        stats.accepted += completion.usage.accepted_tokens
        stats.same += completion.outputs[0].token_ids == other.outputs[0].token_ids
        stats.outputs += 1


def report(found: dict[str, dict[str, Stats]]) -> str:
    """Return a table with a row for each kind and mode."""
    rows = []
    for kind, by_mode in found.items():
        first, *_ = by_mode.values()
        for mode, stats in by_mode.items():
            right = f"{stats.accepted / stats.drafted:.0%}" if stats.drafted else "-"
            ratio = f"{stats.rate / first.rate:.2f}"
            same = f"{stats.same}/{stats.outputs}"
            rows.append((kind, mode, f"{stats.rate:.1f}", ratio, stats.drafted, right, same))
    return table(("kind", "mode", "tokens/s", "ratio", "drafted", "right", "same"), rows)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="maximum drafted tokens per step")
    parser.add_argument("--modes", nargs="+", default=["off", "ngram", "suffix", "auto"])
    parser.add_argument("--kinds", nargs="+", default=[*PROMPTS, "mix"], choices=[*PROMPTS, "mix"])
    parser.add_argument("flags", nargs="*", help="more flags of `octavo serve`, after --")
    options = parser.parse_args()
    flags = ("--num-speculative-tokens", str(options.tokens), "--no-enable-prefix-caching")
    with contextlib.ExitStack() as stack:
        addresses = {
            mode: stack.enter_context(
                local_server(options.model, "--speculation", mode, *flags, *options.flags)
            )
            for mode in options.modes
        }
        print(report(asyncio.run(measure(addresses, options.kinds, options.rounds))))


if __name__ == "__main__":
    main()
