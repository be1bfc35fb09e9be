"""Whatever an answer holds can be sent back, wherever it was cut."""

import json
import math
import random

import pytest
from transformers import AutoTokenizer

from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.response_template import NAME as RESPONSE_TEMPLATE
from tests.router.requests.parsers.outputs import EXAMPLES, SCHEMAS

TURNS = 6
CONVERSATIONS = 2_000
FAMILIES = tuple(family for family in TOOL_FORMATS if family != RESPONSE_TEMPLATE)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
_CALLS = (
    "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}"
    "<s>{{{{ m.role }}}}:{head}{{% for c in m.tool_calls or [] %}}"
    "[{{{{ c.function.name }}}}]{arguments}{{% endfor %}}{{% endfor %}}<s>assistant:"
)
_BOTH = "{{ m.content or '' }}{{ m.reasoning_content or '' }}"
_ONE = (
    "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.content or m.thinking }}"
)
TEMPLATES = (
    _CALLS.format(head=_BOTH, arguments="{{ c.function.arguments | tojson }}"),
    _CALLS.format(
        head=_BOTH,
        arguments="{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    ),
    _CALLS.format(head=_ONE, arguments="{{ c.function.arguments + '' }}"),
)
"""Those that write arguments as JSON, one by one, and as text."""


@pytest.fixture(scope="module")
def directories(tokenizer_dir, tmp_path_factory):
    made = []
    for template in TEMPLATES:
        loaded = AutoTokenizer.from_pretrained(tokenizer_dir)
        loaded.chat_template = template
        path = tmp_path_factory.mktemp("template")
        loaded.save_pretrained(path)
        (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        made.append(str(path))
    return made


async def streamed(client, **body):
    """Return a stream's message, put together as clients do."""
    message, calls = {"role": "assistant", "content": None}, {}
    async for chunk in await client.chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for key in ("content", "reasoning_content", "reasoning"):
            if key in delta:
                message[key] = (message.get(key) or "") + delta[key]
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"function": {"name": "", "arguments": ""}})
            call |= {key: piece[key] for key in ("id", "type") if key in piece}
            for key, text in piece["function"].items():
                call["function"][key] += text
    return message | ({"tool_calls": list(calls.values())} if calls else {})


async def whole(client, **body):
    answer = await client.chat.completions.create(**body)
    return answer.choices[0].message.model_dump()


async def converse(client, hello, examples, said, draw):
    """Have one conversation; a client that is refused raises."""
    messages = [*hello["messages"]]
    for _ in range(draw.randint(1, TURNS)):
        output = draw.choice(examples).output
        said[:] = [output[: draw.randint(1, len(output))] if draw.random() < 0.8 else output]
        ask = draw.choice((whole, streamed))
        message = await ask(client, **hello | {"messages": messages}, tools=TOOLS)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "22"} for call in calls
        ]
        messages.append({"role": "user", "content": "and now?"})


@pytest.mark.parametrize(
    "conversations",
    [1, pytest.param(math.ceil(CONVERSATIONS / len(FAMILIES)), marks=pytest.mark.slow)],
)
async def test_answers_cut_anywhere_are_taken_back(
    frontend, scripted, encode, hello, directories, conversations
):
    draw = random.Random(conversations)
    for number, family in enumerate(FAMILIES):
        examples = [one for one in EXAMPLES if one.format == family]
        said: list[str] = []
        engine = scripted(
            tokenizer=directories[number % len(directories)],
            script=lambda *_, said=said: encode(said[0]),
            interval=0,
            max_model_len=1 << 20,
            features={"constraints": True},
        )
        reasoning = family if family in REASONING_FORMATS else "think"
        parsers = {"tool_parser": family, "reasoning_parser": reasoning}
        async with frontend(engine, **parsers) as (_, client):
            for _ in range(conversations):
                await converse(client, hello, examples, said, draw)
