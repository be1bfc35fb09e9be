"""Any answer can be sent back as a message, wherever it was cut."""

import json
import math
import random

import pytest
from transformers import AutoTokenizer

from octavo.router.requests.parsers import REASONING_FORMATS, TOOL_FORMATS
from octavo.router.requests.parsers.gpt_oss import NAME as GPT_OSS  # its forced calls need channels
from tests.router.requests.parsers.outputs import EXAMPLES, GEMMA, SCHEMAS

TURNS = 6
CONVERSATIONS = 2_000
FAMILIES = tuple(TOOL_FORMATS)
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
"""Templates that write arguments as JSON, one by one, and as text."""
ANCHOR = f"{{{{ {GEMMA['start_anchor']!r} }}}}"
CHOICES = ("auto", "required", *({"type": "function", "function": {"name": n}} for n in SCHEMAS))


@pytest.fixture(scope="module")
def directories(tokenizer_dir, tmp_path_factory):
    made = []
    for template in TEMPLATES:
        loaded = AutoTokenizer.from_pretrained(tokenizer_dir)
        loaded.chat_template = template.removesuffix("<s>assistant:") + ANCHOR
        loaded.response_template = GEMMA
        path = tmp_path_factory.mktemp("template")
        loaded.save_pretrained(path)
        (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        made.append(str(path))
    return made


async def streamed(client, **body):
    """Return a stream's message, assembled as clients do."""
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


async def converse(client, hello, examples, said, encode, draw):
    """Have a conversation; a refused client raises."""
    messages = [*hello["messages"]]
    for _ in range(draw.randint(1, TURNS)):
        example = draw.choice(examples)
        output, more = example.output, {}
        if example.calls and example.format != GPT_OSS and draw.random() < 0.5:
            more = {"tool_choice": draw.choice(CHOICES)}
        cut = draw.random()
        if cut < 0.4:
            output = output[: draw.randint(1, len(output))]
        elif cut < 0.8:
            more["max_tokens"] = draw.randint(1, len(encode(output)))
        said[:] = [output]
        ask = draw.choice((whole, streamed))
        message = await ask(client, **hello | {"messages": messages}, tools=TOOLS, **more)
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
                await converse(client, hello, examples, said, encode, draw)
