"""Chats with tools, converted for templates of different kinds."""

import json

import pytest
from transformers import AutoTokenizer

from octavo.common.rpc import RpcError
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import generation_pb2

CALL = {"id": "c1", "name": "f", "arguments": '{"a": 1}'}
CHAT = generation_pb2.ChatPrompt(
    messages=[
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "R"},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ],
    tools=[{"name": "f", "description": "F"}],
    add_generation_prompt=False,
)


@pytest.fixture
def render(tokenizer_dir):
    loaded = AutoTokenizer.from_pretrained(tokenizer_dir)

    def render(template: str, chat: generation_pb2.ChatPrompt = CHAT) -> str:
        loaded.chat_template = template
        return Tokenizer(loaded).render(chat)

    return render


def test_arguments_are_text_where_templates_join_them(render):
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ 'json ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert render(template) == 'json {"a": 1}'
    assert (
        render(template.replace("+ c.function.arguments", "~ c.function.arguments.a")) == "json 1"
    )


def test_content_is_none_where_templates_ask_that(render):
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}"
        "{% if m['content'] is none %}calls {{ m.tool_calls[0].id }}{% endif %}{% endfor %}"
    )
    assert render(template) == "calls c1"
    assert render("{{ tools and '' }}{{ messages[2].content }}") == ""


def test_roles_and_reasoning_have_the_names_of_the_template(render):
    assert render("{{ tools and '' }}{{ messages[0].role }}") == "system"
    assert render("{{ tools and '' }}{% if messages[0].role == 'developer' %}D{% endif %}") == "D"
    assert render("{{ tools and '' }}{{ messages[2].thinking }}") == "R"
    assert render("{{ tools and '' }}{{ messages[2].keys() | list }}") == (
        "['role', 'content', 'tool_calls']"
    )


def test_a_template_without_tools_has_them_in_text(render):
    text = render("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    system, user, assistant, result = text.split("\n[")
    assert system.startswith("[system] D\n\nYou can call functions.")
    assert '{"name": "f", "description": "F", "parameters"' in system
    assert user == "user] ?"
    assert assistant == (
        'assistant] <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert result == "user] <tool_response>\n42\n</tool_response>\n"


AS_JSON = (
    "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
AS_IT_IS = AS_JSON.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}",
)
ONE_BY_ONE = AS_JSON.replace(
    "{{ c.function.arguments | tojson }}",
    "{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}",
)
JOINING = AS_JSON.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '!' }}")


def with_call(arguments: str, **fields) -> generation_pb2.ChatPrompt:
    call = {"name": "f", "arguments": arguments}
    user = {"role": "user", "content": "?"}
    message = {"role": "assistant", "tool_calls": [call], **fields}
    return generation_pb2.ChatPrompt(
        messages=[user, message], tools=[{"name": "f"}], add_generation_prompt=False
    )


@pytest.mark.parametrize("cut", ['{"', '{"a": 1', "[1]", "null", '"a"', "no JSON", "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_are(render, cut):
    chat = with_call(cut)
    assert render(AS_IT_IS, chat) == cut
    assert render(AS_JSON, chat) == json.dumps(cut)
    assert render(ONE_BY_ONE, chat) == f"arguments={cut};"
    assert render(JOINING, chat) == f"{cut}!"


def test_other_calls_keep_their_objects_beside_them(render):
    chat = with_call('{"a": 1}')
    chat.messages[1].tool_calls.add(name="f", arguments='{"b')
    assert render(ONE_BY_ONE, chat) == 'a=1;arguments={"b;'
    assert render(AS_IT_IS, chat) == '{"a": 1}{"b'


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', r'{"\udc00": "x"}'])
def test_half_a_surrogate_pair_stays_an_escape(render, arguments):
    for template in (AS_JSON, AS_IT_IS):
        assert render(template, with_call(arguments)) == arguments
    assert "\\u" in render(ONE_BY_ONE, with_call(arguments))


def test_a_preamble_joins_reasoning_where_a_template_takes_only_one(render):
    """An example is gpt-oss's, whose calls have their reasoning in one place."""
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
        "{{ m.content or m.thinking }}|{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %}{% endfor %}"
    )
    both = with_call('{"a": 1}', content="I look.", reasoning="So.")
    assert render(template, both) == 'So.\n\nI look.|{"a": 1}'
    assert render(template, with_call('{"', content="I look.", reasoning="So.")).startswith("So.")
    assert render(template, with_call("{}", content="I look.")) == "I look.|{}"
    taking_both = template.replace("raise_exception('not both')", "m.thinking + '+'")
    assert render(taking_both, both) == 'So.+I look.|{"a": 1}'


def test_a_refusal_is_what_the_template_says_of_the_usual_form(render):
    with pytest.raises(RpcError, match=r"refuses chat\.messages: no calls"):
        render("{{ tools and '' }}{{ raise_exception('no calls') }}", with_call('{"'))
