"""Send hostile constraints beside a stream, and measure what they cost it.

    python -m benchmarks.hostile_constraints [--model demo] [--count 1000] [--streams 4]

Constraints are made to take too much of something: deep nesting, huge alternatives, exponential
expressions, endless repetition. The streams decode without a constraint. Windows with and without
hostile requests take turns; of each kind of window the step times are printed, and of the
constraints how many were refused and served, and how long the longest took.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from benchmarks.one_engine import OneEngine
from octavo.common.models import resolve as models

Made: TypeAlias = tuple[str, str]
"""A constraint's kind and text."""

LETTERS = "abcdefgh"
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


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def window(
    engine: OneEngine, streams: int, made: list[Made], at_once: int, seconds: float
) -> list[float]:
    """Decode for some seconds, and until the hostile requests have ended.

    Returns:
        The streams' seconds between tokens.
    """
    left, until = list(made), time.monotonic() + seconds
    ids: list[str] = []
    waiting: list[str] = []
    while left or any(map(engine.runs, waiting)) or time.monotonic() < until:
        while sum(map(engine.runs, ids)) < streams:
            ids.append(
                engine.submit(None, max_tokens=200, eos_token_ids=frozenset(), prompt=PROMPT)
            )
        waiting = [request_id for request_id in waiting if engine.runs(request_id)]
        while left and len(waiting) < at_once:
            waiting.append(engine.submit(*left.pop(), max_tokens=16, prompt=PROMPT))
        time.sleep(0.02)
    steps: list[float] = []
    for request_id in ids:
        steps += [late - early for early, late in pairwise(engine.wait(request_id).times)]
    return steps


def measure(
    model: str, count: int, streams: int, *, windows: int, at_once: int, seconds: float
) -> bool:
    """Measure and print; return whether no constraint failed otherwise than by refusal."""
    engine = OneEngine(str(models.resolve(model)), seconds=1, compile="wait", max_model_len=1024)
    draw = random.Random(0)
    made = [hostile(draw) for _ in range(count)]
    engine.run("regex", "warm", max_tokens=4)
    calm: list[float] = []
    hit: list[float] = []
    began = time.monotonic()
    for i in range(windows):
        calm += window(engine, streams, [], at_once, seconds)
        hit += window(engine, streams, made[i::windows], at_once, seconds)
    ended = list(engine.ended.values())
    failures = [each.failure for each in ended if each.failure is not None]
    odd = [failure for failure in failures if failure.field != "constraint"]
    counters = engine.compiler.counters
    print(f"{count} constraints in {time.monotonic() - began:.0f} s: {len(failures)} refused")
    print(f"compiling: longest {max(counters.take_seconds()):.1f} s")
    for name, steps in (("calm", calm), ("hostile", hit)):
        shown = ", ".join(
            f"{label} {1e3 * value:.2f}"
            for label, value in (
                ("median", statistics.median(steps)),
                ("p95", percentile(steps, 0.95)),
                ("p99", percentile(steps, 0.99)),
                ("max", max(steps)),
            )
        )
        print(f"{name:8} {len(steps)} steps, ms: {shown}")
    ratio = percentile(hit, 0.99) / percentile(calm, 0.99)
    print(f"p99 with hostile requests: {ratio:.3f} of p99 without")
    for failure in odd:
        print(f"failed otherwise: {failure.message}")
    engine.settle(120)
    engine.close()
    return not odd


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.DEMO)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="of each window, at least")
    sys.exit(not measure(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
