"""Send hostile constraints beside a stream, and measure what they cost it.

    python -m benchmarks.hostile_constraints [--model demo] [--count 1000] [--streams 4]

Constraints are made to take too much of something: deep nesting, huge alternatives, exponential
expressions, endless repetition. The streams decode without a constraint. After a window with
hostile requests comes one of at most 45 s, in which an ordinary request comes at each moment at
which a hostile one was served, with as many tokens: so what differs are the constraints alone.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from benchmarks.one_engine import OneEngine
from benchmarks.report import percentiles, verdict
from octavo.common import logging
from octavo.common.models import resolve as models

Made: TypeAlias = tuple[str, str]
"""A constraint's kind and text."""

LETTERS = "abcdefgh"
MAX_ORDINARY_SECONDS = 45
MAX_RATIO = 1.1
"""Of the streams' p99, beside hostile constraints and without."""
PROMPT = range(9, 40)


def hostile(draw: random.Random) -> Made:
    """Return the kind and the text of a random hostile constraint."""
    return draw.choice(KINDS)(draw)


def _deep_schema(draw: random.Random) -> Made:
    depth = draw.choice([50, 120, 1000, 20_000])
    key = draw.choice(['{"items":', '{"type":"object","properties":{"a":', '{"anyOf":[{},'])
    close = {"{": "}", "[": "]"}
    ends = "".join(close[c] for c in reversed(key) if c in close)
    if key.startswith('{"anyOf"'):
        key, ends = '{"anyOf":[', "]}"
    return "json_schema", key * depth + "{}" + ends * depth


def _alternatives(draw: random.Random) -> Made:
    count = draw.choice([100, 1000, 5000])
    return "json_schema", json.dumps(
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(count)]}
    )


def _properties(draw: random.Random) -> Made:
    count = draw.choice([200, 2000, 6000])
    return "json_schema", json.dumps({"properties": {f"k{i}": {} for i in range(count)}})


def _multiples(draw: random.Random) -> Made:
    parts = [{"type": "integer", "multipleOf": draw.randrange(9_000, 99_999)} for _ in range(3)]
    return "json_schema", json.dumps({"allOf": parts})


def _long(draw: random.Random) -> Made:
    bound = 10 ** draw.randrange(3, 9)
    keyword = draw.choice(["minLength", "maxLength", "minItems", "maxItems"])
    return "json_schema", json.dumps({keyword: bound})


def _big_constant(draw: random.Random) -> Made:
    return "json_schema", json.dumps({"enum": [draw.choice(LETTERS) * draw.randrange(1, 900_000)]})


def _product(draw: random.Random) -> Made:
    options = [
        [{"type": "object", "properties": {f"k{i}{j}": {}}} for j in range(draw.randrange(2, 6))]
        for i in range(draw.randrange(3, 12))
    ]
    return "json_schema", json.dumps({"allOf": [{"anyOf": each} for each in options]})


def _cycle(_: random.Random) -> Made:
    return "json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})


def _repeats(draw: random.Random) -> Made:
    atom = draw.choice(["(a|b|c)", "(a|a)*", ".", r"\p{L}", "(a{0,100}){0,100}"])
    return "regex", f"{atom}{{0,{10 ** draw.randrange(2, 9)}}}"


def _automaton(draw: random.Random) -> Made:
    steps = draw.randrange(5, 300)
    first, second = draw.sample(LETTERS, 2)
    return "regex", f"(.*{first}.{{{steps}}}{second}|.*{second}.{{{steps + 1}}}{first})"


def _overlaps(draw: random.Random) -> Made:
    parts = [f"({a}|{a}{draw.choice(LETTERS)})*" for a in draw.choices(LETTERS, k=40)]
    return "regex", "".join(parts)


def _words(draw: random.Random) -> Made:
    count = draw.choice([1000, 30_000])
    return "regex", "|".join(f"w{draw.randrange(10**9)}" for _ in range(count))


def _parentheses(draw: random.Random) -> Made:
    depth = draw.choice([100, 1000, 50_000])
    return "regex", "(" * depth + "a" + ")" * depth


def _chain(draw: random.Random) -> Made:
    length = draw.choice([1000, 50_000])
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return "grammar", f'start: r0\n{rules}\nr{length}: "a"'


def _doubling(draw: random.Random) -> Made:
    length = draw.randrange(20, 70)
    name = draw.choice(["r", "T"])
    rules = "\n".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(length))
    return "grammar", f'start: {name}0\n{rules}\n{name}{length}: "a"'


def _ambiguous(draw: random.Random) -> Made:
    rule = draw.choice(['a a | a a a | "x" | ""', '"x" a | "x" a a |', 'a a | a "x" | "x" a | "x"'])
    return "grammar", f"start: a\na: {rule}"


def _negations(draw: random.Random) -> Made:
    parts = [f"~/.*{draw.choice(LETTERS)}.{{{draw.randrange(5, 40)}}}b.*/" for _ in range(3)]
    return "grammar", f"start: T\nT: {' & '.join(parts)}"


def _intersections(draw: random.Random) -> Made:
    parts = [f"/(.*{letter}.*){{3,{draw.randrange(5, 20)}}}/" for letter in LETTERS]
    return "grammar", f"start: T\nT: {' & '.join(parts)}"


def _repeated_rules(draw: random.Random) -> Made:
    return "grammar", f'start: a{{0,{10 ** draw.randrange(3, 9)}}}\na: "x" | "y" a'


def _many_rules(draw: random.Random) -> Made:
    count = draw.choice([500, 5000, 20_000])
    rules = "\n".join(f'r{i}: "k{i}" r{draw.randrange(count)}' for i in range(count))
    return "grammar", f"start: {' | '.join(f'r{i}' for i in range(count))}\n{rules}"


def _noise(draw: random.Random) -> Made:
    letters = '(){}[]|*+?.\\"/:~&<>%abc \n'
    text = "".join(draw.choices(letters, k=draw.randrange(1, 2000)))
    return draw.choice(["json_schema", "regex", "grammar"]), text


KINDS: list[Callable[[random.Random], Made]] = [
    *(_deep_schema, _alternatives, _properties, _multiples, _long, _big_constant, _product, _cycle),
    *(_repeats, _automaton, _overlaps, _words, _parentheses),
    *(_chain, _doubling, _ambiguous, _negations, _intersections, _repeated_rules, _many_rules),
    _noise,
]


@dataclass(frozen=True, slots=True)
class Arrival:
    """An ordinary request that stands for a hostile one that was served.

    Attributes:
        seconds: When it comes, after the beginning.
        tokens: Of its output.
    """

    seconds: float
    tokens: int


class Streams:
    """Streams without a constraint that decode while other requests come and go.

    Args:
        engine: The engine.
        count: How many there are at a time.
    """

    def __init__(self, engine: OneEngine, count: int) -> None:
        self._engine = engine
        self._count = count
        self._ids: list[str] = []
        self.began = time.perf_counter()

    def keep_up(self) -> None:
        """Start a stream for each that has ended, and wait a little."""
        while sum(map(self._engine.runs, self._ids)) < self._count:
            self._ids.append(
                self._engine.submit(None, max_tokens=200, eos_token_ids=frozenset(), prompt=PROMPT)
            )
        time.sleep(0.02)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.began

    def gaps(self) -> list[float]:
        """Wait for their ends; return the seconds between their tokens."""
        ended = [self._engine.wait(request_id) for request_id in self._ids]
        return [late - early for each in ended for early, late in pairwise(each.times)]


def run_hostile(
    engine: OneEngine, streams: int, made: Sequence[Made], at_once: int
) -> tuple[list[float], list[Arrival]]:
    """Decode beside hostile requests until they have ended.

    Returns:
        The streams' seconds between tokens, and what was served beside them.
    """
    beside, left = Streams(engine, streams), list(made)
    waiting: list[str] = []
    ids: list[str] = []
    while left or waiting:
        beside.keep_up()
        waiting = [request_id for request_id in waiting if engine.runs(request_id)]
        while left and len(waiting) < at_once:
            ids.append(engine.submit(*left.pop(), max_tokens=16, prompt=PROMPT))
            waiting.append(ids[-1])
    ended = [engine.wait(request_id) for request_id in ids]
    served = [each for each in ended if each.times]
    arrivals = [Arrival(each.times[0] - beside.began, len(each.times)) for each in served]
    return beside.gaps(), sorted(arrivals, key=lambda arrival: arrival.seconds)


def run_ordinary(
    engine: OneEngine, streams: int, arrivals: Sequence[Arrival], seconds: float
) -> list[float]:
    """Decode for some seconds beside ordinary requests; return the streams' times as above."""
    beside, left = Streams(engine, streams), deque(arrivals)
    while beside.seconds < seconds:
        beside.keep_up()
        while left and left[0].seconds < beside.seconds:
            tokens = left.popleft().tokens
            engine.submit(None, max_tokens=tokens, eos_token_ids=frozenset(), prompt=PROMPT)
    return beside.gaps()


def measure(
    model: str, count: int, streams: int, *, windows: int, at_once: int, beside: int
) -> bool:
    """Measure and print; return whether both marks are met."""
    logging.configure(log_level="error")
    engine = OneEngine(str(models.resolve(model)), seconds=1, max_model_len=1024, pin=True)
    draw = random.Random(0)
    made = [hostile(draw) for _ in range(count)]
    engine.run("regex", "warm", max_tokens=4)
    run_ordinary(engine, streams, [], 2)
    before = len(engine.ended)
    calm: list[float] = []
    hit: list[float] = []
    for i in range(windows):
        began = time.perf_counter()
        gaps, arrivals = run_hostile(engine, streams, made[:beside][i::windows], at_once)
        hit += gaps
        took = time.perf_counter() - began
        print(f"window {i + 1} of {windows}: {took:.0f} s, {len(arrivals)} served", flush=True)
        calm += run_ordinary(engine, streams, arrivals, min(took, MAX_ORDINARY_SECONDS))
        for name, steps in (("ordinary", calm), ("hostile", hit)):
            median, slow, most = percentiles(steps)
            shown = f"median {median:.2f}, p99 {slow:.2f}, max {most:.2f}"
            print(f"  beside {name:8} {len(steps)} steps, ms: {shown}", flush=True)
    began = time.perf_counter()
    run_hostile(engine, 0, made[beside:], at_once)
    print(f"the other {count - beside}: {time.perf_counter() - began:.0f} s", flush=True)
    ended = list(engine.ended.values())[before:]
    failures = [each.failure for each in ended if each.failure is not None]
    counts = Counter(failure.code.name for failure in failures if failure.field == "constraint")
    odd = [failure for failure in failures if failure.field != "constraint"]
    print(f"{count} constraints: {counts}, {count - len(failures)} served to their end or limit")
    late = engine.metrics.late_masks.collect()[0].samples[0].value
    print(f"{late:.0f} masks were late")
    for failure in odd:
        print(f"failed otherwise: {failure.message}")
    engine.settle(120)
    engine.close()
    ratio = percentiles(hit)[1] / percentiles(calm)[1]
    return all(
        (
            verdict(not odd, "each is refused by name or served within its limits"),
            verdict(ratio < MAX_RATIO, f"p99 beside hostile ones is {ratio:.3f} of p99 without"),
        )
    )


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--beside", type=int, default=40, help="number of those that run beside streams"
    )
    sys.exit(not measure(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
