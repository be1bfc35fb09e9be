"""Keywords removed from a schema: the rest compiles, and accepts whatever the whole accepts."""

import itertools
import json
import re
from decimal import Decimal
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher
from pydantic import Base64Bytes, BaseModel, Field

from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.grammar import to_grammar
from octavo.engine.constraints.json_schema import unenforceable
from octavo.router.requests.lenient_schema import ENCODINGS, FORMATS, lenient
from octavo.router.requests.patterns import held

STRING = {"type": "string"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    age: int


class Order(BaseModel):
    tags: set[str]
    price: Decimal
    image: Base64Bytes
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    counts: Annotated[dict[str, int], Field(min_length=2)]


def refusal(schema) -> str:
    """Return why the engine would refuse a schema; empty if it accepts it."""
    why = unenforceable(schema)
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),))
    return why or LLMatcher.validate_grammar(to_grammar(constraint), None)


def test_a_model_of_pydantic_s():
    schema = Order.model_json_schema()
    assert refusal(schema)
    found = lenient(schema)
    assert found.unenforced == (
        "#/properties/counts/minProperties",
        "#/properties/image/format",
        "#/properties/tags/uniqueItems",
    )
    assert refusal(found.schema) == ""
    properties = found.schema["properties"]
    assert properties["tags"] == {"items": STRING, "title": "Tags", "type": "array"}
    assert properties["counts"]["minProperties"] == 1
    assert properties["image"]["pattern"] == ENCODINGS["base64"]
    assert properties["pet"]["anyOf"] == schema["properties"]["pet"]["oneOf"]
    assert schema == Order.model_json_schema(), "it is another's"


def branches(*each, **more):
    return {"oneOf": list(each), **more}


def cat(*, required=("kind",), **kind):
    properties = {"kind": kind, "x": STRING}
    return {"type": "object", "properties": properties, "required": list(required)}


A, B = cat(const="a"), cat(enum=["b", "c"])


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"uniqueItems": True}, ["uniqueItems"]),
        ({"uniqueItems": False}, []),
        ({"not": STRING}, ["not"]),
        ({"not": False}, []),
        ({"if": STRING, "then": {"minLength": 1}, "else": {}}, ["else", "if", "then"]),
        ({"if": STRING}, []),
        ({"then": STRING}, []),
        ({"contains": STRING, "maxContains": 2}, ["contains", "maxContains"]),
        ({"minContains": 2}, []),
        ({"propertyNames": {"maxLength": 3}}, ["propertyNames"]),
        ({"propertyNames": STRING}, []),
        ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        ({"dependencies": {}}, []),
        ({"unevaluatedProperties": False}, ["unevaluatedProperties"]),
        ({"unevaluatedItems": True}, []),
        ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, ["$dynamicRef"]),
        ({"x-order": 1, "enumNames": [], "discriminator": {}, "example": 1}, []),
        ({"enum": ["a\x01"]}, ["enum"]),
        ({"type": "string", "format": "uri-reference"}, ["format"]),
        ({"type": "integer", "format": "int32"}, []),
        ({"pattern": DECIMAL}, ["pattern"]),
        ({"pattern": r"(a)\1"}, ["pattern"]),
        ({"pattern": "^[a-z]{2}$"}, []),
        ({"minProperties": 2}, ["minProperties"]),
        ({"minProperties": 1, "maxProperties": 4}, []),
        ({"minProperties": 2, "required": ["a", "b"]}, []),
        ({"properties": {"a": {}}, "maxProperties": 1}, ["maxProperties"]),
        ({"properties": {"a": {}}, "required": ["a"], "maxProperties": 2}, []),
        ({"allOf": [{"minProperties": 1}, {"required": ["a"]}]}, ["allOf/0/minProperties"]),
        ({"patternProperties": {"(?!a)b/": {}}}, ["patternProperties/(?!a)b~1"]),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, ["patternProperties/^ab"]),
        ({"patternProperties": {"^a": {}, "^b": STRING}}, []),
        (
            {"patternProperties": {r"\bb": {}}, "additionalProperties": False},
            ["additionalProperties", r"patternProperties/\bb"],
        ),
        (branches(A, B), []),
        (branches({"$ref": "#/$defs/a"}, B, {"type": "null"}, **{"$defs": {"a": A}}), []),
        (branches(STRING, {"type": "integer"}), []),
        (branches({"type": "number"}, {"type": "integer"}), ["oneOf"]),
        (branches(A, A), ["oneOf"]),
        (branches(A, cat(const="b", required=())), []),
        (branches(cat(const="a", required=()), cat(const="b", required=())), ["oneOf"]),
        (branches(A, {"properties": {"kind": {"const": "b"}}}), ["oneOf"]),
        (branches(A, B, anyOf=[{}]), []),
        (branches({**A, "uniqueItems": True}, B), ["oneOf/0/uniqueItems"]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"not": {}}}}, ["$defs/a~1b/not"]),
        ({"$defs": {"a": {"not": {}}}}, []),
        (
            {"properties": {"a": {"$ref": "#/not"}, "b": {"uniqueItems": True}}, "not": STRING},
            ["not", "properties/a/$ref", "properties/b/uniqueItems"],
        ),
        ({"properties": {"a": {"$ref": "#/oneOf/1"}}, **branches(STRING, {"type": "null"})}, []),
    ],
    ids=str,
)
def test_what_is_left_out(schema, places):
    found = lenient(schema)
    assert found.unenforced == tuple(f"#/{place}" for place in places)
    assert refusal(found.schema) == ""


def test_references_are_kept():
    schema = branches(STRING, {"type": "null"}, properties={"a": {"$ref": "#/oneOf/1"}})
    assert lenient(schema).schema["properties"]["a"] == {"$ref": "#/anyOf/1"}
    schema["anyOf"] = [{}]
    assert lenient(schema).schema["properties"]["a"] == {"$ref": "#/allOf/0/anyOf/1"}
    tree = {"items": {"$ref": "#"}, "type": "array", "uniqueItems": True}
    assert lenient(tree).schema == {"items": {"$ref": "#"}, "type": "array"}


def test_what_is_no_reference_stays_the_engine_s_to_refuse():
    for reference in ["#/$defs/none", "http://127.0.0.1:9/x", "#none", f"#/{'9' * 5000}"]:
        schema = {"$ref": reference, "uniqueItems": True}
        assert lenient(schema).schema == {"$ref": reference}


def test_the_formats_are_the_engine_s():
    named = {*FORMATS, *Draft202012Validator.FORMAT_CHECKER.checkers, *ENCODINGS, "int64", ""}
    taken = {name for name in named if not refusal({"type": "string", "format": name})}
    assert taken == FORMATS


def test_names_are_counted_where_the_engine_counts_them():
    counts = [None, 0, 1, 2, 3]
    for least, most, names, more in itertools.product(counts, counts, range(3), [False, {}]):
        schema = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"][:names]}
        schema["additionalProperties"] = more
        schema |= {} if least is None else {"minProperties": least}
        schema |= {} if most is None else {"maxProperties": most}
        found = lenient(schema)
        assert refusal(found.schema) == "", schema
        possible = (least or 0) <= (3 if most is None else most) >= names
        assert not found.unenforced or refusal(schema) or not possible, schema


def test_large_schemas_take_no_long_time():
    many = 3_000
    each = [cat(const=str(i)) for i in range(many)]
    chain = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(many)}
    spelt = [{"$ref": f"#/%24defs/{'%61' if i % 2 else 'a'}{i}"} for i in range(many)]
    for schema in [
        branches(*each),
        {"$ref": "#/$defs/a0", "$defs": chain},
        {"allOf": spelt, "$defs": chain},
        {"pattern": "(" * many + "^a|" * many + ")" * many},
        {"patternProperties": {f"^a{i}": {} for i in range(many)}},
        {"anyOf": [{"$ref": "#" + "/oneOf/0" * many}] * 100},
        {"properties": {"a" * 500_000: {"allOf": [{"not": {}}, {"oneOf": []}] * many}}},
    ]:
        lenient(schema)


ATOMS = ["a", "b", "[ab]", ".", r"\d", r"\x61", "(", "(?:", ")", "|", "*", "+?", "{2}", "^", "$"]
ATOMS += [r"\b", "(?=", "(?!", "(?<=", "[^a]", r"\1", "(?i)", "x{"]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(ATOMS), max_size=9), st.lists(st.text("ab1", max_size=4)))
def test_patterns_compile_and_match_whatever_the_whole_does(atoms, texts):
    pattern = "".join(atoms)
    found = held(pattern)
    if found is None:
        return
    assert refusal({"type": "string", "pattern": found.pattern}) == ""
    try:
        whole, wider = re.compile(pattern), re.compile(found.pattern)
    except re.error:
        return  # look-behind of any width, which Python lacks
    for text in texts:
        matches = bool(whole.search(text))
        assert wider.search(text) if matches else not (found.exact and wider.search(text))


NAMES = st.sampled_from(["a", "b", "ab"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


KEYWORDS = (
    *("$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "items"),
    *("maxProperties", "minProperties", "oneOf", "pattern", "patternProperties", "propertyNames"),
    *("properties", "required", "then", "type", "uniqueItems"),
)


def keywords(inner):
    small, several = st.integers(0, 2), st.lists(inner, min_size=1, max_size=2)
    patterns = st.sampled_from(["^a", "^b$", "^ab", "a(?!b)", r"\bb", "(a)\\1"])
    types = ["array", "boolean", "integer", "null", "number", "object", "string"]
    pieces = {
        "type": st.sampled_from(types),
        **dict.fromkeys(["allOf", "anyOf", "oneOf", "prefixItems"], several),
        **dict.fromkeys(["not", "if", "then", "else", "contains", "propertyNames"], inner),
        **dict.fromkeys(["items", "additionalProperties", "unevaluatedProperties"], inner),
        **dict.fromkeys(["minProperties", "maxProperties", "minContains", "minItems"], small),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "uniqueItems": st.booleans(),
        "pattern": patterns,
        "format": st.sampled_from(["base64", "date", "nonsense"]),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=2),
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b", "#/$defs/a/not", "#/$defs/b/oneOf/0"]),
    }
    return st.lists(st.sampled_from(sorted(pieces)), max_size=3, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: pieces[name] for name in chosen})
    )


SCHEMAS = st.recursive(st.booleans() | keywords(st.just({})), keywords, max_leaves=8)
NOT_SUPPORTED = re.compile(
    r"Unimplemented|Unknown format|oneOf constraints|disjoint|lookaround|regex parse"
    r"|min/maxProp|/minProp"
)


CHECKER = FormatChecker(formats=())
CHECKER.checks("base64")(
    lambda value: not isinstance(value, str) or bool(re.search(ENCODINGS["base64"], value))
)


def valid(schema, value) -> bool | None:
    """Return whether a value is valid; None if the schema refers to itself or to nothing."""
    try:
        return Draft202012Validator(schema, format_checker=CHECKER).is_valid(value)
    except Exception:  # noqa: BLE001 - several of the library's own
        return None


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(sorted(KEYWORDS)), VALUES, max_size=4))
def test_what_is_no_schema_is_left_to_the_engine(schema):
    lenient({"properties": {"a": schema}, "oneOf": [schema, schema]})


@settings(deadline=None, max_examples=100)
@given(keywords(SCHEMAS), keywords(SCHEMAS), keywords(SCHEMAS), st.lists(VALUES, max_size=8))
def test_the_rest_compiles_and_accepts_whatever_the_whole_does(schema, a, b, values):
    schema = {**schema, "$defs": {"a": a, "b": b}}
    found = lenient(schema)
    assert not NOT_SUPPORTED.search(refusal(found.schema))
    for value in values:
        if valid(schema, value):
            assert valid(found.schema, value) is not False
        elif not found.unenforced and valid(schema, value) is False:
            assert not valid(found.schema, value)
