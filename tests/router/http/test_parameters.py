"""Every parameter reaches the engine; unsupported ones are refused by name."""

import json

import openai
import pytest

OURS = {
    "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True,
    "stop_token_ids": [7, 8], "priority": 3, "cache_salt": "mine",
}  # fmt: skip


async def test_parameters_reach_the_engine(frontend, scripted, hello):
    engine = scripted("hello world STOP and more")
    async with frontend(engine) as (_, client):
        answer = await client.chat.completions.create(
            **hello, n=2, stop=["STOP"], max_completion_tokens=50, temperature=0.5, top_p=0.75,
            frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"5": -1}, seed=-1,
            user="me", extra_body=OURS,
        )  # fmt: skip
    assert [c.message.content for c in answer.choices] == ["hello world "] * 2
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    (submit,) = engine.submits
    sampling = submit.sampling
    assert (sampling.n, sampling.temperature, sampling.top_p) == (2, 0.5, 0.75)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (dict(sampling.logit_bias), sampling.seed) == ({5: -1}, 2**64 - 1)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    stop = submit.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (50, 2, True)
    assert (list(stop.token_ids), submit.priority, submit.cache_salt) == ([7, 8], 3, "mine")


async def test_one_stop_string_and_max_tokens(frontend, scripted, hello):
    engine = scripted("hello world")
    async with frontend(engine) as (_, client):
        answer = await client.chat.completions.create(**hello, stop="wor", max_tokens=9)
    assert answer.choices[0].message.content == "hello "
    assert engine.submits[0].stop.max_tokens == 9


CHAT = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"extra_body": {"grammar": "root ::= x"}}, "grammar"),
    ({"extra_body": {"reasoning_effort": "most"}}, "reasoning_effort"),
    ({"extra_body": {"reasoning": {"effort": 3}}}, "reasoning.effort"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"max_completion_tokens": 513}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 513}, "max_completion_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"seed": 2**64}, "seed"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"length_penalty": 2}}, "length_penalty"),
    ({"extra_body": {"early_stopping": True}}, "early_stopping"),
    ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"extra_body": {"echo": True}}, "echo"),
    ({"extra_body": {"request_id": "a b"}}, "request_id"),
    ({"extra_body": {"request_id": "a\nX-Evil: 1"}}, "request_id"),
    ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"chat_template_kwargs": 5}}, "chat_template_kwargs"),
    (
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
        "continue_final_message",
    ),
    ({"extra_body": {"stop_token_ids": [260]}}, "stop_token_ids"),
    ({"extra_body": {"priority": 101}}, "priority"),
    ({"extra_body": {"beam_width": 0}}, "n"),
    ({"extra_body": {"beam_width": 2}, "temperature": 1}, "beam_width"),
    ({"extra_body": {"beam_width": 2}, "stream": True}, "beam_width"),
    ({"extra_body": {"beam_width": 2}, "n": 3}, "n"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"extra_body": {"max_reasoning_tokens": 1, "thinking_token_budget": 2}},
        "thinking_token_budget",
    ),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
        "tools[0].function.input_schema",
    ),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
    (
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
        "messages[0].prefix",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "response_format.schema",
    ),
]
COMPLETIONS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"extra_body": {"chat_template_kwargs": {}}}, "chat_template_kwargs"),
    ({"extra_body": {"add_special_tokens": False}}, "add_special_tokens"),
    ({"suffix": "x"}, "suffix"),
]


async def test_a_wrong_argument_is_named(frontend, scripted, hello):
    engine = scripted("a")
    async with frontend(engine) as (app, client):
        for extra, param in CHAT:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{**hello, **extra})
            assert caught.value.param == param, extra
        for extra, param in COMPLETIONS:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**{"model": "tiny", "prompt": "x", **extra})
            assert caught.value.param == param, extra
        await app.clean()
    assert not engine.submits


async def test_arguments_without_effect_are_accepted(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        answer = await client.chat.completions.create(
            **hello, tools=[], tool_choice="none", response_format={"type": "text"}, store=False,
            service_tier="auto", parallel_tool_calls=False, metadata={"a": "b"}, stop=None,
            temperature=None, extra_body={"top_k": None},
        )  # fmt: skip
    assert answer.choices[0].message.content == "a"


VLLM = {
    "add_generation_prompt": True, "add_special_tokens": False, "allowed_token_ids": None,
    "bad_words": [], "chat_template": None, "chat_template_kwargs": {}, "detokenize": True,
    "continue_final_message": False, "documents": None, "early_stopping": False, "echo": False,
    "guided_choice": None, "guided_json": None, "ignore_eos": False, "include_reasoning": True,
    "include_stop_str_in_output": False, "length_penalty": 1.0, "logits_processors": None,
    "min_p": 0.0, "min_tokens": 0, "priority": 0, "prompt_logprobs": None, "request_id": "mine",
    "return_token_ids": None, "return_tokens_as_token_ids": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stop_token_ids": [], "structured_outputs": None,
    "top_k": -1, "truncate_prompt_tokens": None, "use_beam_search": False, "vllm_xargs": None,
}  # fmt: skip


async def test_all_that_vllm_s_users_send_with_its_default_is_accepted(frontend, scripted, hello):
    engine = scripted("a")
    async with frontend(engine) as (_, client):
        answer = await client.chat.completions.create(
            **hello, logprobs=False, top_logprobs=0, max_tokens=5, max_completion_tokens=5,
            extra_body=VLLM,
        )  # fmt: skip
        assert answer.id == "chatcmpl-mine"
        chat_only = {"add_generation_prompt", "chat_template", "chat_template_kwargs",
                     "continue_final_message", "documents", "include_reasoning"}  # fmt: skip
        extra = {name: value for name, value in VLLM.items() if name not in chat_only}
        await client.completions.create(
            model="tiny", prompt="x", n=2, best_of=2, suffix="",
            extra_body=extra | {"add_special_tokens": True, "response_format": {"type": "text"}},
        )  # fmt: skip
    for submit in engine.submits:
        assert submit.sampling.HasField("top_k")
        assert submit.sampling.top_k == 0
        assert not submit.HasField("beam")


async def test_the_error_of_a_beam_search_s_option_says_what_it_needs(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        with pytest.raises(openai.BadRequestError, match="length_penalty needs beam_width"):
            await client.chat.completions.create(**hello, extra_body={"length_penalty": 2})


async def test_a_stop_string_stays_if_told(frontend, scripted, hello):
    async with frontend(scripted("hello world")) as (_, client):
        for name in ("include_stop", "include_stop_str_in_output"):
            answer = await client.chat.completions.create(
                **hello, stop="wor", extra_body={name: True}
            )
            assert answer.choices[0].message.content == "hello wor"


async def test_special_tokens_stay_if_told(frontend, scripted, hello, encode):
    tokens = [*encode("a"), 257, *encode("b")]
    async with frontend(scripted(script=lambda *_: tokens)) as (_, client):
        for extra, text in [
            ({}, "ab"),
            ({"skip_special_tokens": True}, "ab"),
            ({"skip_special_tokens": False}, "a<s>b"),
            ({"keep_special_tokens": True}, "a<s>b"),
        ]:
            answer = await client.chat.completions.create(**hello, extra_body=extra)
            assert answer.choices[0].message.content == text, extra


@pytest.mark.parametrize(
    ("extra", "prompt"),
    [
        ({}, "<s>user:hi<s>assistant:"),
        ({"add_generation_prompt": False}, "<s>user:hi"),
        ({"continue_final_message": True}, "<s>user:hi"),
        ({"chat_template_kwargs": {"mood": {"level": 2}}}, "mood 2<s>user:hi<s>assistant:"),
    ],
)
async def test_a_chat_s_layout(frontend, scripted, hello, get, encode, extra, prompt):
    engine = scripted("a")
    async with frontend(engine) as (app, client):
        await client.chat.completions.create(**hello, extra_body=extra)
        assert list(engine.submits[0].prompt_token_ids) == encode(prompt)
        body = json.dumps({"messages": hello["messages"], **extra}).encode()
        headers = {"Content-Type": "application/json"}
        response = await get(f"{app.url}/tokenize", headers=headers, data=body)
        assert json.loads(response.body)["tokens"] == encode(prompt)


async def test_invalid_bodies(frontend, scripted, post):
    async with frontend(scripted("a"), max_message_bytes=2000) as (app, _):
        for body, status, words in [
            (b"", 400, "not JSON"),
            (b"{", 400, "not JSON"),
            (b"[]", 400, "must be a JSON object"),
            (b'{"messages": "\xff"}', 400, "not JSON"),
            (b'{"prompt": "\\ud800"}', 400, "not JSON"),
            (b'{"prompt": ' + b"[" * 900, 400, "not JSON"),
            (b'{"prompt": "' + b"x" * 2000 + b'"}', 413, "at most 2000 bytes"),
            (b"{}", 400, "prompt: field required"),
            (b'{"prompt": "x", "temperature": NaN}', 400, "temperature must be in"),
        ]:
            response = await post(f"{app.url}/v1/completions", body)
            assert response.status == status, body
            assert words in json.loads(response.body)["error"]["message"], body
        response = await post(f"{app.url}/v1/completions", b"{}", kind="text/plain")
        assert response.status == 415
