"""Calls in a family's own form satisfy the tool's schema, for any logits."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.v1.generation_pb2 import ToolChoiceMode
from tests.router.requests.parsers.outputs import GEMMA
from tests.router.requests.test_output_plan import EOS, MARKERS, Model, ask, plan, read

DEFS = {
    "Color": {"enum": ["red", "1", "null"], "type": "string"},
    "Node": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
ARGUMENTS = {
    "string": {"type": "string"},
    "short": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": r"^[a-c<>/]+\d$"},
    "found": {"type": "string", "pattern": "null|</"},
    "date": {"type": "string", "format": "date", "description": "When"},
    "words": {"enum": ["a", "\nb\n", 'c "d"']},
    "one": {"const": "None"},
    "integer": {"type": "integer", "minimum": -3, "maximum": 12},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "optional": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}], "default": None},
    "both": {"type": ["string", "integer"], "maximum": 5, "maxLength": 5},
    "flag": {"oneOf": [{"type": "boolean"}, {"type": "string", "minLength": 5}]},
    "mixed": {"enum": ["a", 1, None, True]},
    "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "one or more": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "object": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "any": {},
    "color": {"$ref": "#/$defs/Color", "description": "A color"},
    "node": {"allOf": [{"$ref": "#/$defs/Node"}]},
    "node or null": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
}


NATIVE = ("qwen3_coder", "glm", "minimax", "dsml", "seed_oss", "pythonic")
"""Formats whose arguments are not JSON."""


def of(*names, **more) -> dict:
    properties = {name.replace(" ", "_"): ARGUMENTS[name] for name in names}
    return {"type": "object", "properties": properties, "$defs": DEFS, **more}


SCHEMAS = {name: of(name, required=[name.replace(" ", "_")]) for name in ARGUMENTS} | {
    "optional ones": of("string", "integer", "boolean", required=["integer"]),
    "all optional": of("string", "null"),
    "map": {"type": "object", "additionalProperties": {"type": ["integer", "string"]}},
    "not named": {"type": "object", "required": ["a"]},
    "odd names": {
        "type": "object",
        "properties": {
            name: {"type": "integer"} for name in ("from", "my-key", "é", 'a "b"', "a\n")
        },
        "required": ["from", "my-key"],
    },
    "says more": of("string", "integer", minProperties=1),
    "refers to itself": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"$ref": "#"}},
        "required": ["a"],
    },
}
SNIPPETS = (
    *(
        "null",
        "None",
        "true",
        "False",
        "12",
        "-1.5e3",
        " ",
        "\n",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
    ),
    *(
        "</parameter>",
        "\n</parameter>",
        "</arg_value>",
        "</function>",
        "</tool_call>",
        "<tool_call>",
    ),
    *(
        "</invoke>",
        "</\uff5cDSML\uff5cparameter>",
        "<|tool_call_end|>",
        '<|"|>',
        "é",
        "a",
        ", ",
        ")",
    ),
    *(["\n</parameter>", "</arg_value>", "</", '"', ", "] * 5),
    *("<tool_call|>", "</seed:tool_call>", "<function=", "\x1c", "日"),
)


SEEDS = 1


def write(model: Model, grammar: str, seed: int) -> str:
    """Return an output that a grammar allows, made of text that is easily misread."""
    matcher = LLMatcher(model.matcher_tokens, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    draw, ids = random.Random(seed), []
    while len(ids) < 6000:
        if draw.random() < 0.5:
            wanted = draw.choice(SNIPPETS).encode()
            taken = matcher.try_consume_tokens(model.bytes(wanted))
            ids += model.bytes(wanted)[:taken]
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        special = [token for token in allowed if token >= EOS]
        token = draw.choice(special if special and draw.random() < 0.3 else allowed)
        if token == EOS:
            return model.tokenizer.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    raise AssertionError("it does not end")


@pytest.fixture(scope="module", params=NATIVE)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name) -> Model:
    markers = [one for one in MARKERS[name] if "think" not in one.lower()]
    template = GEMMA if name == "response_template" else None
    return Model(markers, response_template=template)


@pytest.mark.few(40)
@pytest.mark.parametrize("kind", SCHEMAS)
def test_what_a_call_may_be_is_valid(name, model, kind):
    schema = SCHEMAS[kind]
    tool = {"name": "my-tool", "parameters": json.dumps(schema)}
    choice = {"mode": ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED}
    request = ask(tool, choice=choice, parallel_tool_calls=False)
    planned = plan(name, request, model)
    for seed in range(SEEDS):
        text = write(model, planned.constraint.grammar, seed)
        calls, content, _ = read(planned, text)
        assert [called for called, _ in calls] == ["my-tool"], text
        assert not content.strip(), text
        jsonschema.validate(calls[0][1], schema)
        assert read_slowly(planned, text) == calls, text


def read_slowly(planned, text: str):
    parser, pieces = planned.parser(), []
    for character in text:
        pieces += parser.feed(character)
    pieces += parser.flush()
    arguments = "".join(piece for kind, piece in pieces if kind.value == "arguments")
    return [("my-tool", json.loads(arguments))]
