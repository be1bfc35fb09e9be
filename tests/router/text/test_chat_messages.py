"""Chats with tools, laid out for templates of different kinds."""

import pytest
from transformers import AutoTokenizer

from octavo.router.text.tokenization import Tokenizer
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

    def render(template: str) -> str:
        loaded.chat_template = template
        return Tokenizer(loaded).render(CHAT)

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
