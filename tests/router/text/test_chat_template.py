"""Requests set the chat template's variables, and how the prompt ends."""

import math

import pytest
from google.protobuf import struct_pb2
from transformers import AutoTokenizer

from octavo.common.rpc import RpcError
from octavo.router.text.chat_template import template_variables
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import generation_pb2

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(variables=None, **fields) -> generation_pb2.ChatPrompt:
    prompt = generation_pb2.ChatPrompt(messages=MESSAGES, **fields)
    if variables is not None:
        prompt.chat_template_kwargs.update(variables)
    return prompt


@pytest.fixture
def template(tokenizer_dir):
    """Render a chat with a template."""
    loaded = AutoTokenizer.from_pretrained(tokenizer_dir)

    def render(source: str, prompt: generation_pb2.ChatPrompt) -> str:
        loaded.chat_template = source
        return Tokenizer(loaded).render(prompt)

    return render


def test_values_are_those_of_json():
    values = {"a": True, "b": 512, "c": 0.5, "d": None, "e": [1, {"f": "x"}], "g": {}}
    assert template_variables(chat(values)) == values
    assert isinstance(template_variables(chat(values))["b"], int)
    odd = chat()
    odd.chat_template_kwargs.fields["x"].CopyFrom(struct_pb2.Value(number_value=math.inf))
    assert template_variables(odd) == {"x": math.inf}


@pytest.mark.parametrize("name", ["messages", "chat_template", "tools", "tokenize", "return_dict"])
def test_names_that_are_taken(name):
    with pytest.raises(RpcError, match=f"may not have '{name}'") as caught:
        template_variables(chat({name: 1}))
    assert caught.value.field == "chat.chat_template_kwargs"


def test_the_template_sees_them(template):
    source = (
        "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}slow{% endif %}"
    )
    assert template(source, chat()) == "slow"
    assert template(source, chat({"enable_thinking": False})) == "quick"
    assert template("{{ budget }}", chat({"budget": 512})) == "512"


@pytest.mark.parametrize(
    "source", ["{{ 1 // x }}", "{{ x.y.z }}", "{{ x + 'a' }}", "{{ x | join }}"]
)
def test_a_template_that_fails_is_the_request_s_fault(template, source):
    with pytest.raises(RpcError, match="chat template refuses") as caught:
        template(source, chat({"x": 0}))
    assert caught.value.field == "chat.messages"


def test_where_the_prompt_ends(template):
    source = "{% for m in messages %}<{{ m.content }}></s>{% endfor %}"
    source += "{% if add_generation_prompt %}ANSWER{% endif %}"
    assert template(source, chat()) == "<hi></s>ANSWER"
    assert template(source, chat(add_generation_prompt=True)) == "<hi></s>ANSWER"
    assert template(source, chat(add_generation_prompt=False)) == "<hi></s>"
    assert template(source, chat(continue_final_message=True)) == "<hi"
