"""Random JSON Schemas within what is supported, and the check of an output."""

import json
import random
from decimal import Decimal, InvalidOperation, localcontext

from jsonschema import Draft202012Validator

PATTERNS = ["^[a-c]{2,5}$", "x+y?", "^(ab|cd)*$", r"^\d{3}-\d{4}$", '^[^"]{1,8}$']
DIGITS = 10_000
"""Maximum decimals; no output of a test has a longer number."""
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "duration", "hostname"]


def random_schema(draw: random.Random, depth: int = 3) -> object:
    """Return a schema whose outputs a random model can finish within some hundred tokens."""
    kinds = [_string, _draw_number, _enum, _const, _constant_type]
    if depth:
        kinds += [_object, _object, _array, _any_of, _all_of, _map, _tuple, _reference]
    return draw.choice(kinds)(draw, depth - 1)


def check(text: str, schema: object) -> object:
    """Parse an output and check it against its schema; return it."""
    document = json.loads(text, parse_float=_number)
    exact = json.loads(json.dumps(schema), parse_float=_number)
    validator = Draft202012Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)
    with localcontext(prec=DIGITS):
        validator.validate(document)
    return document


def _number(text: str) -> Decimal | float:
    """Return a number exactly as written, or infinity if its exponent exceeds decimals' range."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def _string(draw, _):
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 24}
    if kind == 1:
        return {"type": "string", "format": draw.choice(FORMATS), "maxLength": 40}
    low = draw.randrange(6)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randrange(8)}


def _draw_number(draw, _):
    schema = {"type": draw.choice(["integer", "number"])}
    low = draw.choice([-1000, -3.5, 0, 7, 12345])
    bound = draw.choice(["minimum", "exclusiveMinimum"])
    schema[bound] = low
    schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.choice([2, 17, 1e4])
    if draw.randrange(3) == 0:
        schema["multipleOf"] = draw.choice([1, 0.5, 0.25])
    return schema


def _enum(draw, _):
    return {"enum": draw.sample([1, "a", None, True, 2.5, ["x", 1], {"k": "v"}, 'é\n"q'], 3)}


def _const(draw, _):
    return {"const": draw.choice(["constant", 17, {"a": [1, {"b": None}]}, ["😀", False]])}


def _constant_type(draw, _):
    return {"type": draw.choice(["boolean", "null", ["null", "boolean"]])}


def _object(draw, depth):
    names = draw.sample(["name", "id", "tags", "größe", "a b", 'quo"te', "x/y~z", "n\n"], 3)
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth) for name in names},
        "required": draw.sample(names, draw.randrange(4)),
        "additionalProperties": draw.choice([False, {"type": "integer", "maximum": 9}]),
    }


def _map(draw, depth):
    return {
        "type": "object",
        "additionalProperties": random_schema(draw, min(depth, 1)),
        "minProperties": draw.randrange(2),
        "maxProperties": 2 + draw.randrange(2),
    }


def _array(draw, depth):
    low = draw.randrange(3)
    return {
        "type": "array",
        "items": random_schema(draw, depth),
        "minItems": low,
        "maxItems": low + draw.randrange(3),
    }


def _tuple(draw, depth):
    return {
        "type": "array",
        "prefixItems": [random_schema(draw, min(depth, 1)) for _ in range(2)],
        "items": draw.choice([False, {"type": "boolean"}]),
        "minItems": 1,
        "maxItems": 3,
    }


def _any_of(draw, depth):
    return {"anyOf": [random_schema(draw, depth) for _ in range(2)]}


def _all_of(draw, _):
    low = draw.randrange(50)
    return {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": low}}},
            {"properties": {"a": {"maximum": low + 40}, "b": {"type": "boolean"}}},
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False},
            {"required": ["a", "b"]},
        ]
    }


def _reference(draw, depth):
    tree = {
        "type": "object",
        "properties": {
            "value": random_schema(draw, 0),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": tree}} if depth == 2 else {"type": "null"}
