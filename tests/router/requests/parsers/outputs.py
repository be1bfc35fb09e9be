"""Outputs with calls in the format of each family's chat template, and their meaning.

Written from the templates, which render an assistant's message with calls as the model wrote it.
"""

from dataclasses import dataclass, field
from typing import Any

WEATHER = {"city": "Paris", "days": 2, "detailed": True}
TRICKY = {"city": 'a "b" \\ </tool_call> }{][', "days": 0, "detailed": False}
UNICODE = {"city": "日本 é \n", "days": -1, "detailed": False}
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Example:
    """An output, and its meaning."""

    name: str
    format: str
    output: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    thinks: str | None = None
    tail: str = ""


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "detailed": true}}'
NOW = '{"name": "now", "arguments": {}}'
BOTH = [("get_weather", WEATHER), ("now", {})]
D = {
    "begin": "<\uff5ctool▁calls▁begin\uff5c>",
    "end": "<\uff5ctool▁calls▁end\uff5c>",
    "call": "<\uff5ctool▁call▁begin\uff5c>",
    "call_end": "<\uff5ctool▁call▁end\uff5c>",
    "sep": "<\uff5ctool▁sep\uff5c>",
}
ARGS = '{"city": "Paris", "days": 2, "detailed": true}'
QWEN = """<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
2
</parameter>
<parameter=detailed>
true
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
<arg_key>detailed</arg_key>
<arg_value>true</arg_value>
</tool_call>"""
MINIMAX = """<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
<parameter name="days">2</parameter>
<parameter name="detailed">true</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""

DSML = """<|DSML|function_calls>
<|DSML|invoke name="get_weather">
<|DSML|parameter name="city" string="true">Paris</|DSML|parameter>
<|DSML|parameter name="days" string="false">2</|DSML|parameter>
<|DSML|parameter name="detailed" string="false">true</|DSML|parameter>
</|DSML|invoke>
<|DSML|invoke name="now">
</|DSML|invoke>
</|DSML|function_calls>""".replace("|", "\uff5c")
SEED = """<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
<parameter=days>2</parameter>
<parameter=detailed>true</parameter>
</function>
</seed:tool_call>"""

EXAMPLES = [
    Example("one", "hermes", hermes(PARIS), BOTH[:1]),
    Example("text first", "hermes", f"Let me look.\n{hermes(PARIS, NOW)}", BOTH, "Let me look."),
    Example(
        "no call",
        "hermes",
        "Tags < look <tool like this.\n\n",
        [],
        "Tags < look <tool like this.\n\n",
    ),
    Example(
        "tricky",
        "hermes",
        hermes(
            '{"name": "get_weather", "arguments": {"city": "a \\"b\\" \\\\ </tool_call> }{][",'
            ' "days": 0, "detailed": false}}'
        ),
        [("get_weather", TRICKY)],
    ),
    Example(
        "arguments first",
        "hermes",
        hermes('{"arguments": {"city": "Paris"}, "name": "get_weather"}'),
        [("get_weather", {"city": "Paris"})],
    ),
    Example(
        "arguments in a string",
        "hermes",
        hermes('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'),
        [("get_weather", {"city": "Paris"})],
    ),
    Example("no arguments", "hermes", hermes('{"name": "now"}'), [("now", {})]),
    Example("no end", "hermes", f"<tool_call>\n{PARIS}", BOTH[:1]),
    Example("cut marker", "hermes", f"{hermes(NOW)}\n<tool_ca", BOTH[1:]),
    Example("cut end", "hermes", f"<tool_call>\n{NOW}\n</tool_cal", BOTH[1:]),
    Example("text after", "hermes", f"{hermes(NOW)}\n\nDone.", BOTH[1:], "Done."),
    Example("no JSON", "hermes", "<tool_call>\nsorry\n</tool_call>", [], "sorry"),
    Example(
        "reasons",
        "hermes",
        f"<think>\nParis <tool_call> it is.\n\n</think>\n\n{hermes(PARIS)}",
        BOTH[:1],
        "",
        "Paris <tool_call> it is.",
        thinks="think",
    ),
    Example("one", "qwen3_coder", QWEN, BOTH[:1]),
    Example(
        "text and lines",
        "qwen3_coder",
        "Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n日本 é \n\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("get_weather", {"city": "日本 é \n", "tags": ["a", "b"]}), ("now", {})],
        "Yes.",
    ),
    Example(
        "quotes and Python",
        "qwen3_coder",
        QWEN.replace("Paris", 'a "b" \\ </param').replace("true", "True"),
        [("get_weather", {"city": 'a "b" \\ </param', "days": 2, "detailed": True})],
    ),
    Example(
        "empty",
        "qwen3_coder",
        QWEN.replace("Paris\n", ""),
        [("get_weather", WEATHER | {"city": ""})],
    ),
    Example("as JSON", "qwen3_coder", hermes(PARIS, NOW), BOTH),
    Example("one", "glm", GLM, BOTH[:1]),
    Example("two", "glm", f"Well.\n{GLM}\n<tool_call>now\n</tool_call>", BOTH, "Well."),
    Example("as JSON", "glm", hermes(PARIS), BOTH[:1]),
    Example("reasons", "glm", f"\n<think>Hm.</think>\n{GLM}", BOTH[:1], "", "Hm.", thinks="think"),
    Example(
        "joined",
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value><arg_key>detailed</arg_key>"
        "<arg_value>true</arg_value></tool_call>",
        BOTH[:1],
    ),
    Example("two", "minimax", MINIMAX, BOTH),
    Example("two", "dsml", DSML, BOTH),
    Example(
        "text, JSON and V4",
        "dsml",
        "I look.\n\n"
        + DSML.replace("function_calls", "tool_calls")
        .replace("Paris", ' a "b" \\ </parameter>\n')
        .replace('"days" string="false">2', '"tags" string="false">["a", "b"]'),
        [
            (
                "get_weather",
                {"city": ' a "b" \\ </parameter>\n', "tags": ["a", "b"], "detailed": True},
            ),
            ("now", {}),
        ],
        "I look.",
    ),
    Example(
        "reasons",
        "dsml",
        f"Hm.</think>\n\n{DSML}",
        BOTH,
        "",
        "Hm.",
        thinks="think",
        tail="<\uff5cAssistant\uff5c><think>",
    ),
    Example("one", "seed_oss", SEED, BOTH[:1]),
    Example(
        "reasons",
        "seed_oss",
        f"<seed:think>Hm.</seed:think>\n{SEED}",
        BOTH[:1],
        "",
        "Hm.",
        thinks="seed",
    ),
    Example("list", "tool_calls", f"<tool_calls>[{PARIS}, {NOW}]</tool_calls>", BOTH),
    Example(
        "lines",
        "tool_calls",
        f"Look.<tool_calls>[\n    {PARIS},\n    {NOW}\n]</tool_calls>",
        BOTH,
        "Look.",
    ),
    Example("list", "nemotron", f"<TOOLCALL>[{PARIS}, {NOW}]</TOOLCALL>", BOTH),
    Example(
        "two",
        "longcat",
        f"<longcat_tool_call>\n{PARIS}\n</longcat_tool_call>\n"
        f"<longcat_tool_call>\n{NOW}\n</longcat_tool_call>",
        BOTH,
    ),
    Example(
        "one",
        "internlm",
        "<|action_start|><|plugin|>\n"
        + PARIS.replace("arguments", "parameters")
        + "\n<|action_end|>",
        BOTH[:1],
    ),
    Example(
        "text",
        "internlm",
        "I look.<|action_start|><|plugin|>"
        + NOW.replace("arguments", "parameters")
        + "<|action_end|>\n",
        BOTH[1:],
        "I look.",
    ),
    Example("one", "llama3", '{"name": "get_weather", "parameters": ' + ARGS + "}", BOTH[:1]),
    Example(
        "type and marker",
        "llama3",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": ' + ARGS + "}",
        BOTH[:1],
    ),
    Example(
        "two",
        "llama3",
        '{"name": "get_weather", "parameters": ' + ARGS + '}; {"name": "now", "parameters": {}}',
        BOTH,
    ),
    Example(
        "an answer in JSON",
        "llama3",
        '{"answer": {"city": "Paris"}}',
        [],
        '{"answer": {"city": "Paris"}}',
    ),
    Example(
        "a name in JSON", "llama3", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'
    ),
    Example("text", "llama3", "So {x} it is.", [], "So {x} it is."),
    Example("list", "pythonic", '[get_weather(city="Paris", days=2, detailed=True), now()]', BOTH),
    Example(
        "markers",
        "pythonic",
        "Let me.<|tool_call_start|>[get_weather(city='Paris', days=2, detailed=true), now()]"
        "<|tool_call_end|>",
        BOTH,
        "Let me.",
    ),
    Example(
        "markers alone",
        "pythonic",
        '<|tool_call_start|>[get_weather(city="Paris", days=2, detailed=True), now()]'
        "<|tool_call_end|>",
        BOTH,
    ),
    Example(
        "names that are not Python's",
        "pythonic",
        '[get-weather(from="Paris", my-key=[1, {"a": None}]), now(**{"a": true})]',
        [("get-weather", {"from": "Paris", "my-key": [1, {"a": None}]}), ("now", {"a": True})],
    ),
    Example("no call", "pythonic", "[1, 2] is a list", [], "[1, 2] is a list"),
    Example(
        "brackets",
        "pythonic",
        '[get_weather(city="a]) \\" b")]',
        [("get_weather", {"city": 'a]) " b'})],
    ),
    Example("list", "mistral", f"[TOOL_CALLS][{PARIS}, {NOW}]", BOTH),
    Example(
        "list with ids",
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + ARGS + ', "id": "a1b2c3d4e"}, '
        '{"name": "now", "arguments": {}, "id": "f1b2c3d4e"}]',
        BOTH,
    ),
    Example(
        "names",
        "mistral",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{{}}",
        BOTH,
        "Sure.",
    ),
    Example("ids", "mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{ARGS}", BOTH[:1]),
    Example(
        "reasons",
        "mistral",
        "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}",
        BOTH[1:],
        "",
        "Hm.",
        thinks="mistral",
    ),
    Example(
        "V3",
        "deepseek",
        "{begin}{call}function{sep}get_weather\n```json\n".format(**D)
        + ARGS
        + "\n```{call_end}\n{call}function{sep}now\n```json\n{{}}\n```{call_end}{end}".format(**D),
        BOTH,
    ),
    Example(
        "V3.1",
        "deepseek",
        "I look.\n\n{begin}{call}get_weather{sep}".format(**D)
        + ARGS
        + "{call_end}{call}now{sep}{{}}{call_end}{end}".format(**D),
        BOTH,
        "I look.",
    ),
    Example(
        "R1",
        "deepseek",
        "Hm.\n</think>\n\n{begin}{call}function{sep}now\n```json\n{{}}\n```{call_end}{end}".format(
            **D
        ),
        BOTH[1:],
        "",
        "Hm.",
        thinks="think",
        tail="<\uff5cAssistant\uff5c><think>\n",
    ),
    Example(
        "two",
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        BOTH,
    ),
    Example("markers", "phi4", f"<|tool_call|>[{PARIS}, {NOW}]<|/tool_call|>", BOTH),
    Example("word", "phi4", f"functools[{PARIS}]", BOTH[:1]),
    Example("list", "granite", f"<|tool_call|>[{PARIS}, {NOW}]", BOTH),
    Example("other marker", "granite", f"<tool_call>[{PARIS}]", BOTH[:1]),
    Example(
        "call",
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGS}<|call|>",
        BOTH[:1],
        "",
        "Hm.",
    ),
    Example(
        "recipient first",
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}",
        BOTH[1:],
        "I look.",
    ),
    Example(
        "answer",
        "gpt_oss",
        "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>2 < 3"
        "<|return|>",
        [],
        "2 < 3",
        "1",
    ),
    Example(
        "goes on",
        "gpt_oss",
        "2 < 3",
        [],
        "2 < 3",
        tail="<|start|>assistant<|channel|>final<|message|>1 <",
    ),
    Example("no format", "gpt_oss", "Hello", [], "Hello"),
    Example(
        "opened",
        "hermes",
        "Hm.\n</think>\n\nYes.",
        [],
        "Yes.",
        "Hm.",
        thinks="think",
        tail="assistant\n<think>\n",
    ),
    Example("closed", "hermes", "Yes.", [], "Yes.", thinks="think", tail="<think>\n\n</think>\n\n"),
    Example("not at the start", "hermes", "a <think> b", [], "a <think> b", thinks="think"),
    Example("cut", "hermes", "<think>\nHm.\n", [], "", "Hm.\n", thinks="think"),
    Example("seed", "hermes", "<seed:think>Hm.</seed:think>Yes.", [], "Yes.", "Hm.", thinks="seed"),
    Example(
        "Gemma 4",
        "response_template",
        "<|channel>thought\nHm.\n<channel|>I look."
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,'
        "days:2,detailed:true}<tool_call|><|tool_call>call:now{}<tool_call|>",
        BOTH,
        "I look.",
        "Hm.",
        tail="<|turn>model\n",
    ),
    Example("text", "response_template", "2 < 3 ", [], "2 < 3", tail="<|turn>model\n"),
]
GEMMA = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|turn>model\n",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<turn|>"], "content": "text"},
    },
}
"""A tokenizer's response_template, in Gemma 4's form."""
