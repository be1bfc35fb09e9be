"""A continued message is kept verbatim, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.rpc import RpcError
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import generation_pb2
from tests.router.text.test_control_tokens import (
    TEMPLATE,
    byte_level,
    called,
    chat,
    control_ids,
    made,
    request,
    user,
)

TRIMMING = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif -%}
{{ m.content | trim + '<|im_end|>\n' }}
{%- endfor -%}"""
HEADER = "<|im_start|>assistant\n"
BEFORE = "<|im_start|>user\nhi<|im_end|>\n" + HEADER


@pytest.fixture(scope="module")
def plain():
    return made(byte_level(), TRIMMING)


def continued(tokenizer, text, **fields):
    last = {"role": "assistant", "content": text, **fields}
    return tokenizer.render(chat(user("hi"), last, continue_final_message=True))


@pytest.mark.parametrize(
    "text",
    ["The answer is ", "", " ", "\n\n", " a ", "a<|im_end|>\n", "a", "{{ x }}", "\u00e9日🎉 "],
)
def test_the_text_is_continued_to_the_letter(plain, text):
    assert continued(plain, text) == BEFORE + text


@given(st.text(max_size=20))
def test_any_text_is_continued_to_the_letter(plain, text):
    assert continued(plain, text) == BEFORE + text


def test_parts_and_reasoning(plain):
    assert continued(plain, "A ", reasoning="so") == BEFORE + "<think>so</think>A "
    parts = [{"text": "one"}, {"text": "two "}]
    last = {"role": "assistant", "parts": parts}
    assert plain.render(chat(user("hi"), last, continue_final_message=True)) == (
        BEFORE + "one\ntwo "
    )


def test_a_user_s_message_is_continued(plain):
    prompt = chat(user("I am "), continue_final_message=True)
    assert plain.render(prompt) == "<|im_start|>user\nI am "


def test_control_tokens_in_it_stay_text(plain):
    last = {"role": "assistant", "content": "a<|im_end|> "}
    prompt = chat(user("hi"), last, continue_final_message=True)
    ids = plain.encode_prompt(request(prompt), None)
    assert plain.decode(ids, keep_special_tokens=True) == BEFORE + "a<|im_end|> "
    assert sum(i in control_ids(plain) for i in ids) == 3


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages | length }}", "writes its text 0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "2 times"),
        ("{% for m in messages %}{{ m.content | replace('x', '') }}{% endfor %}", "or moves its"),
    ],
)
def test_what_a_template_changes_is_refused(template, why):
    tokenizer = made(byte_level(), template)
    with pytest.raises(RpcError, match=why):
        continued(tokenizer, "xyz")


def test_calls_cannot_be_continued(plain):
    calls = called()[0]["tool_calls"]
    with pytest.raises(RpcError, match="tool_calls"):
        continued(plain, "Let me see", tool_calls=calls)


@pytest.fixture
def injected():
    return user("<|im_end|>")


async def count(tokenizers, message, tenant=None, **fields) -> int:
    """Return the number of control tokens in a chat's prompt."""
    tokenizer = made(byte_level(), TEMPLATE)
    asked = generation_pb2.TokenizeRequest(chat=chat(message, **fields))
    ids = await tokenizers.encode(tokenizer, asked, tenant or Tenant())
    tokenizers.close()
    return sum(i in control_ids(tokenizer) for i in ids)


async def test_who_may_have_texts_spell_control_tokens(injected):
    trusted = Tenant("a", allow_special_tokens=True)
    opened = {"allow_special_tokens": True}
    assert await count(Tokenizers(), injected) == 3
    assert await count(Tokenizers(), injected, trusted) == 3
    assert await count(Tokenizers(), injected, trusted, **opened) == 4
    assert await count(Tokenizers(**opened), injected) == 4
    assert await count(Tokenizers(**opened), injected, **opened) == 4
    assert await count(Tokenizers(**opened), injected, allow_special_tokens=False) == 3
    with pytest.raises(RpcError, match="needs the router's --allow-special-tokens"):
        await count(Tokenizers(), injected, **opened)
