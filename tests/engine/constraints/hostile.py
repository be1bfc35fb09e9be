"""Hostile constraints that exceed limits.

They have deep nesting, huge alternatives, exponential expressions, endless repetition.
"""

import json

LETTERS = "abcdefgh"


def hostile(draw):
    """Return the kind and the text of a random hostile constraint."""
    return draw.choice(KINDS)(draw)


def _deep_schema(draw):
    depth = draw.choice([50, 120, 1000, 20_000])
    key = draw.choice(['{"items":', '{"type":"object","properties":{"a":', '{"anyOf":[{},'])
    close = {"{": "}", "[": "]"}
    ends = "".join(close[c] for c in reversed(key) if c in close)
    if key.startswith('{"anyOf"'):
        key, ends = '{"anyOf":[', "]}"
    return "json_schema", key * depth + "{}" + ends * depth


def _alternatives(draw):
    count = draw.choice([100, 1000, 5000])
    return "json_schema", json.dumps(
        {"anyOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(count)]}
    )


def _properties(draw):
    count = draw.choice([200, 2000, 6000])
    return "json_schema", json.dumps({"properties": {f"k{i}": {} for i in range(count)}})


def _multiples(draw):
    parts = [{"type": "integer", "multipleOf": draw.randrange(9_000, 99_999)} for _ in range(3)]
    return "json_schema", json.dumps({"allOf": parts})


def _long(draw):
    bound = 10 ** draw.randrange(3, 9)
    keyword = draw.choice(["minLength", "maxLength", "minItems", "maxItems"])
    return "json_schema", json.dumps({keyword: bound})


def _big_constant(draw):
    return "json_schema", json.dumps({"enum": [draw.choice(LETTERS) * draw.randrange(1, 900_000)]})


def _product(draw):
    options = [
        [{"type": "object", "properties": {f"k{i}{j}": {}}} for j in range(draw.randrange(2, 6))]
        for i in range(draw.randrange(3, 12))
    ]
    return "json_schema", json.dumps({"allOf": [{"anyOf": each} for each in options]})


def _cycle(_):
    return "json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})


def _repeats(draw):
    atom = draw.choice(["(a|b|c)", "(a|a)*", ".", r"\p{L}", "(a{0,100}){0,100}"])
    return "regex", f"{atom}{{0,{10 ** draw.randrange(2, 9)}}}"


def _automaton(draw):
    steps = draw.randrange(5, 300)
    first, second = draw.sample(LETTERS, 2)
    return "regex", f"(.*{first}.{{{steps}}}{second}|.*{second}.{{{steps + 1}}}{first})"


def _overlaps(draw):
    parts = [f"({a}|{a}{draw.choice(LETTERS)})*" for a in draw.choices(LETTERS, k=40)]
    return "regex", "".join(parts)


def _words(draw):
    count = draw.choice([1000, 30_000])
    return "regex", "|".join(f"w{draw.randrange(10**9)}" for _ in range(count))


def _parentheses(draw):
    depth = draw.choice([100, 1000, 50_000])
    return "regex", "(" * depth + "a" + ")" * depth


def _chain(draw):
    length = draw.choice([1000, 50_000])
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return "grammar", f'start: r0\n{rules}\nr{length}: "a"'


def _doubling(draw):
    length = draw.randrange(20, 70)
    name = draw.choice(["r", "T"])
    rules = "\n".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(length))
    return "grammar", f'start: {name}0\n{rules}\n{name}{length}: "a"'


def _ambiguous(draw):
    rule = draw.choice(['a a | a a a | "x" | ""', '"x" a | "x" a a |', 'a a | a "x" | "x" a | "x"'])
    return "grammar", f"start: a\na: {rule}"


def _negations(draw):
    parts = [f"~/.*{draw.choice(LETTERS)}.{{{draw.randrange(5, 40)}}}b.*/" for _ in range(3)]
    return "grammar", f"start: T\nT: {' & '.join(parts)}"


def _intersections(draw):
    parts = [f"/(.*{letter}.*){{3,{draw.randrange(5, 20)}}}/" for letter in LETTERS]
    return "grammar", f"start: T\nT: {' & '.join(parts)}"


def _repeated_rules(draw):
    return "grammar", f'start: a{{0,{10 ** draw.randrange(3, 9)}}}\na: "x" | "y" a'


def _many_rules(draw):
    count = draw.choice([500, 5000, 20_000])
    rules = "\n".join(f'r{i}: "k{i}" r{draw.randrange(count)}' for i in range(count))
    return "grammar", f"start: {' | '.join(f'r{i}' for i in range(count))}\n{rules}"


def _noise(draw):
    letters = '(){}[]|*+?.\\"/:~&<>%abc \n'
    text = "".join(draw.choices(letters, k=draw.randrange(1, 2000)))
    return draw.choice(["json_schema", "regex", "grammar"]), text


KINDS = [
    *(_deep_schema, _alternatives, _properties, _multiples, _long, _big_constant, _product, _cycle),
    *(_repeats, _automaton, _overlaps, _words, _parentheses),
    *(_chain, _doubling, _ambiguous, _negations, _intersections, _repeated_rules, _many_rules),
    _noise,
]
