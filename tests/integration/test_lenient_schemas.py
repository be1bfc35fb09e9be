"""Schemas from pydantic, through unmodified clients, with a real server.

The demo model is small and repeats itself: its outputs may violate what no grammar enforces, and
the server then reports it.
"""

from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Annotated, Literal

import httpx
import instructor
import openai
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from langchain_core.exceptions import OutputParserException
from langchain_openai import ChatOpenAI
from pydantic import Base64Bytes, BaseModel, Field, ValidationError, WithJsonSchema, create_model

import octavo

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SETTINGS = {"model": "demo", "temperature": 0, "max_tokens": 100}
HEADER = "x-unenforced-schema"


class Cat(BaseModel, extra="forbid"):
    kind: Literal["cat"]
    color: Literal["black", "red"]


class Dog(BaseModel, extra="forbid"):
    kind: Literal["dog"]
    color: Literal["black", "brown"]


ONE = Literal[1]
NUMBER = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""Pattern of decimal numbers in some versions of pydantic."""
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": NUMBER}]}
FIELDS = {
    "set": (Annotated[set[Literal["a", "b"]], Field(max_length=3)], "uniqueItems"),
    "base64": (Annotated[Base64Bytes, Field(max_length=8)], "format"),
    "map": (Annotated[dict[str, ONE], Field(min_length=2, max_length=2)], "minProperties"),
    "names": (Annotated[dict[Literal["a", "b"], ONE], Field(max_length=2)], "propertyNames"),
    "decimal": (Annotated[Decimal, WithJsonSchema(DECIMAL)], "pattern"),
    "union": (Annotated[Cat | Dog, Field(discriminator="kind")], None),
}
"""Field types, and the keywords of their schemas that are not enforced."""
QUICK = ("set", "union")
"""Field types of the quick tests; the others are slow."""
MODELS = [
    pytest.param(
        create_model(f"Model_{name}", field=(its, ...), __config__={"extra": "forbid"}),
        keyword,
        id=name,
        marks=() if name in QUICK else pytest.mark.slow,
    )
    for name, (its, keyword) in FIELDS.items()
]
each_model = pytest.mark.parametrize(("model", "keyword"), MODELS)


@pytest.fixture(scope="module")
def answers():
    """All of the server's responses, for any client package."""
    return []


@pytest.fixture(scope="module")
def http(answers):
    with httpx.Client(event_hooks={"response": [answers.append]}) as http:
        yield http


@pytest.fixture(scope="module")
def client(served, http):
    return openai.OpenAI(
        base_url=f"{served.http}/v1", api_key="none", max_retries=0, http_client=http
    )


@pytest.fixture(scope="module")
def langchain(served, http):
    return ChatOpenAI(
        base_url=f"{served.http}/v1", api_key="none", max_retries=0, max_completion_tokens=100,
        model="demo", temperature=0, http_client=http,
    )  # fmt: skip


REFUSALS = (
    *(ValidationError, InstructorRetryException, IncompleteOutputException, OutputParserException),
    openai.LengthFinishReasonError,
)


def check(answer, ask, model, keyword) -> None:
    """Check that an answer is an instance or says why not, and names unenforced keywords."""
    try:
        got = ask()
    except REFUSALS:
        got = None
    response = answer[-1]
    assert response.status_code == 200, response.text
    assert (HEADER in response.headers) == (keyword is not None)
    assert keyword is None or keyword in response.headers[HEADER]
    choice = response.json()["choices"][0]
    if got is None:
        assert choice.get("schema_errors") or choice["finish_reason"] == "length", choice
    else:
        assert isinstance(got, model)


@each_model
@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor(client, answers, model, keyword, mode):
    patched = instructor.from_openai(client, mode=mode)
    arguments = {"messages": QUESTION, "response_model": model, "max_retries": 0, **SETTINGS}
    check(answers, lambda: patched.chat.completions.create(**arguments), model, keyword)


@each_model
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(langchain, answers, model, keyword, method):
    """`json_schema` is always strict for a model class, as in `parse`, but not for a schema."""
    schema = model.model_json_schema() if method == "json_schema" else model
    structured = langchain.with_structured_output(schema, method=method)
    check(answers, lambda: model.model_validate(structured.invoke(QUESTION)), model, keyword)


@each_model
def test_openai_s_parse_is_strict(client, answers, model, keyword):
    """It always sets `strict`: unenforceable keywords are refused by name."""
    tools = [openai.pydantic_function_tool(model)]
    for form in [{"response_format": model}, {"tools": tools, "tool_choice": "required"}]:
        ask = partial(client.chat.completions.parse, messages=QUESTION, **form, **SETTINGS)
        if keyword is not None:
            with pytest.raises(openai.BadRequestError, match=f"{keyword}|look-around"):
                ask()
            continue
        with suppress(*REFUSALS):
            ask()
        assert answers[-1].status_code == 200
        assert HEADER not in answers[-1].headers


@each_model
def test_the_python_client(served, model, keyword):
    options = {"max_tokens": 100, "temperature": 0}
    with octavo.Client(served.address) as client:
        got = client.complete(QUESTION, json_schema=model, lenient_schema=True, **options)
        assert bool(got.unenforced) == (keyword is not None)
        if keyword is None:
            return
        assert keyword in got.unenforced[0]
        with pytest.raises(octavo.InvalidArgumentError, match=f"{keyword}|look-around"):
            client.complete(QUESTION, json_schema=model, **options)
        with pytest.raises(octavo.InvalidArgumentError, match="needs constraint"):
            client.complete(QUESTION, regex="a", lenient_schema=True, **options)
