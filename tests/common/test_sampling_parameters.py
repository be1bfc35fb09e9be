"""The table of parameters agrees with the contract, the engine, the commands and HTTP."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.cli.bench.grpc_endpoint import OPTIONS
from octavo.cli.parameter_flags import FLAGS
from octavo.client.requests import generate_request
from octavo.common.sampling_parameters import NEUTRAL, PARAMETERS, TYPES
from octavo.engine.rpc.validation import _sampling
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.router.http.schema import ChatRequest, CompletionRequest
from octavo.v1 import generation_pb2, sampling_pb2
from tools import parameter_table

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
MESSAGES = {
    "sampling": sampling_pb2.SamplingParams,
    "beam": sampling_pb2.BeamSearchParams,
    "stop": sampling_pb2.StopConditions,
    "output": sampling_pb2.OutputOptions,
    "chat": generation_pb2.ChatPrompt,
    "constraint": sampling_pb2.OutputConstraint,
    "constraint.choices": sampling_pb2.Choices,
}


def example(name: str) -> object:
    """Return a value of a parameter's type that is not a default."""
    text = str(TYPES[name])
    for part, value in (
        ("Mapping[str", {"x": 2}),
        ("Mapping", {3: 0.5}),
        ("Sequence[str]", ["x"]),
        ("Sequence[int]", [3]),
    ):
        if part in text:
            return value
    return {"str": "x", "int": 2, "float": 0.5, "bool": True}[
        re.search(r"str|int|float|bool", text)[0]
    ]


def value_at(request, path: str) -> object:
    for part in path.split("."):
        request = getattr(request, part)
    return request


def plain(value: object) -> object:
    if isinstance(value, str | int | float):
        return value
    return dict(value) if hasattr(value, "items") else list(value)


def test_every_field_of_the_contract_has_a_parameter():
    paths = {f"{name}.{f.name}" for name, cls in MESSAGES.items() for f in cls.DESCRIPTOR.fields}
    parents = {"chat.messages", "constraint.choices"}
    assert paths - parents == {p.path for p in PARAMETERS.values() if p.message}
    request = set(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    assert {p.path for p in PARAMETERS.values() if not p.message} <= request


@pytest.mark.parametrize("name", [name for name, p in PARAMETERS.items() if p.message and p.range])
def test_the_contract_states_range_and_default(name):
    parameter = PARAMETERS[name]
    section = MESSAGES[parameter.message].DESCRIPTOR.name
    (rows,) = re.findall(rf"### {section}\n(.*?)(?=\n###? |\Z)", API, re.DOTALL)
    (row,) = re.findall(rf"^\| `{parameter.field}` = .*$", rows, re.MULTILINE)
    assert f"Range {parameter.range}" in row
    assert parameter.default is None or f"Default {parameter.default:g}" in row


def test_the_engine_has_the_same_defaults():
    engine = {field.name: field for field in fields(SamplingParams)}
    assert engine.keys() == {n for n, p in PARAMETERS.items() if p.message == "sampling"} | {
        "logprobs",
        "prompt_logprobs",
    }
    for name, field in engine.items():
        if PARAMETERS[name].default is not None:
            assert field.default == PARAMETERS[name].default
    seeded = sampling_pb2.SamplingParams(seed=0)
    assert _sampling(seeded, sampling_pb2.OutputOptions()) == SamplingParams()


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_the_engine_gets_what_the_client_sends(name):
    request = generate_request("x", {name: example(name)})
    assert getattr(_sampling(request.sampling, request.output), name) == example(name)


@pytest.mark.parametrize("name", [name for name, p in PARAMETERS.items() if p.http])
def test_http_takes_it(name):
    body, prompt, model = {"prompt": "x"}, "x", CompletionRequest
    if PARAMETERS[name].message == "chat":
        body = {"messages": [{"role": "user", "content": "x"}]}
        prompt, model = body["messages"], ChatRequest
    if PARAMETERS[name].message == "beam":
        body["beam_width"] = 2
    options = model.model_validate_json(json.dumps({**body, name: example(name)})).options()
    assert options[name] == example(name)
    path = PARAMETERS[name].path
    assert plain(value_at(generate_request(prompt, options), path)) == example(name)


def test_a_benchmark_sets_all_that_a_model_may_have_defaults_of():
    own = {name for name, p in PARAMETERS.items() if p.generation_config}
    assert own == NEUTRAL.keys() | {"max_tokens"}
    assert {name: PARAMETERS[name].default for name in NEUTRAL} == NEUTRAL
    assert OPTIONS == {**NEUTRAL, "temperature": 0}


def test_docs_are_the_table():
    assert parameter_table.TARGET.read_text() == parameter_table.reference(), "run `make docs`"
    assert all(f"`{name}`" in parameter_table.reference() for name in FLAGS)
