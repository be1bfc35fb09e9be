import asyncio
import json

import openai
import pytest


@pytest.fixture
def count(scripted):
    """An engine that answers each prompt's last token, then the output's index."""
    return scripted(script=lambda submit, i: [submit.prompt_token_ids[-1], 15 + i])


async def test_every_kind_of_prompt(frontend, count, encode):
    async with frontend(count) as (app, client):
        for prompt, texts in [
            ("xa", ["a0"]),
            (["xa", "xb"], ["a0", "b0"]),
            (encode("xa"), ["a0"]),
            ([encode("xa"), encode("xb")], ["a0", "b0"]),
        ]:
            answer = await client.completions.create(model="tiny", prompt=prompt)
            assert [choice.text for choice in answer.choices] == texts
            assert [choice.index for choice in answer.choices] == list(range(len(texts)))
            assert answer.usage.prompt_tokens == 2 * len(texts)
            assert answer.usage.completion_tokens == 2 * len(texts)
        assert answer.object == "text_completion"
        assert {submit.stop.max_tokens for submit in count.submits} == {16}
        await app.clean()


async def test_stream_of_several_prompts(frontend, count):
    async with frontend(count) as (_, client):
        stream = await client.completions.create(
            model="tiny", prompt=["xa", "xb"], n=2, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    texts, ends = [""] * 4, [None] * 4
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert texts == ["a0", "a1", "b0", "b1"]
    assert ends == ["length"] * 4
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 8)


async def test_logprobs_are_columns(frontend, scripted, encode):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        task = asyncio.create_task(client.completions.create(model="tiny", prompt="x", logprobs=2))
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        ids = encode("abc")
        top = [{"token_id": ids[0], "logprob": -0.5}, {"token_id": ids[1], "logprob": -1.5}]
        logprobs = [{"token_id": i, "logprob": -0.5, "top": top} for i in ids]
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, ids, logprobs=logprobs, reason=2)
        (choice,) = (await task).choices
    assert choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.token_logprobs == [-0.5] * 3
    top = {"a": -0.5, "b": -1.5}
    assert choice.logprobs.top_logprobs == [top, top, {**top, "c": -0.5}]


@pytest.fixture
def scored(scripted, encode):
    """Start a scripted engine that scores the prompts' tokens and answers "a" and the end."""

    async def play(app, engine, number: int) -> None:
        await app.until(lambda: len(engine.submits) > number)
        submit = engine.submits[number]
        prompt = [
            {
                "token_id": i,
                "logprob": -0.25,
                "top": [{"token_id": encode("z")[0], "logprob": -0.1}],
            }
            for i in submit.prompt_token_ids[1:]
        ]
        ids = [*encode("a"), 256][: submit.stop.max_tokens]
        logprobs = [{"token_id": i, "logprob": -0.5} for i in ids]
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(
            submit.request_id, ids, reason=1 if 256 in ids else 2,
            logprobs=logprobs if submit.output.HasField("logprobs") else [],
            prompt_logprobs=prompt if submit.output.HasField("prompt_logprobs") else [],
        )  # fmt: skip

    return play


async def echoed(frontend, scripted, scored, **request):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        call = client.completions.create(model="tiny", echo=True, **request)
        task = asyncio.create_task(call)
        await scored(app, engine, 0)
        return await task


async def test_echo_puts_the_prompt_before_the_output(frontend, scripted, scored):
    answer = await echoed(frontend, scripted, scored, prompt="xyé")
    assert answer.choices[0].text == "xyéa"
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 2


async def test_echo_scores_the_prompt(frontend, scripted, scored):
    answer = await echoed(frontend, scripted, scored, prompt="xyé", logprobs=1)
    shown = answer.choices[0].logprobs
    assert shown.tokens == ["x", "y", r"bytes:\xc3", r"bytes:\xa9", "a", "</s>"]
    assert shown.text_offset == [0, 1, 2, 2, 3, 4]
    assert shown.token_logprobs == [None, *[-0.25] * 3, -0.5, -0.5]
    assert shown.top_logprobs[:2] == [None, pytest.approx({"z": -0.1, "y": -0.25})]
    assert len(shown.top_logprobs) == 6


async def test_echo_of_nothing_but_the_prompt(frontend, scripted, scored, encode):
    prompt = [257, *encode("xy")]
    answer = await echoed(frontend, scripted, scored, prompt=prompt, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("<s>xy", "length")
    assert choice.logprobs.tokens == ["<s>", "x", "y"]
    assert choice.logprobs.text_offset == [0, 3, 4]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


@pytest.mark.parametrize(("max_tokens", "text", "tokens"), [(5, "xya", 4), (0, "xy", 2)])
async def test_echo_is_the_first_of_a_stream(frontend, scripted, scored, max_tokens, text, tokens):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        call = client.completions.create(
            model="tiny", prompt="xy", echo=True, logprobs=0, max_tokens=max_tokens, stream=True
        )
        task = asyncio.create_task(call)
        await scored(app, engine, 0)
        chunks = [chunk.choices[0] async for chunk in await task]
    assert chunks[0].text == "xy"
    assert "".join(chunk.text for chunk in chunks) == text
    shown = [logprobs for chunk in chunks if (logprobs := chunk.logprobs)]
    assert [offset for part in shown for offset in part.text_offset] == [0, 1, 2, 3][:tokens]
    assert chunks[-1].finish_reason == ("length" if max_tokens == 0 else "stop")


async def test_one_bad_prompt_fails_all(frontend, count):
    async with frontend(count) as (app, client):
        with pytest.raises(Exception, match="prompt must have at least one character") as caught:
            await client.completions.create(model="tiny", prompt=["good", ""])
        assert caught.value.param == "prompt"
        await app.clean()


async def log_probabilities(frontend, scripted, text_ids, tops=(), **request):
    """Return a completion with token ids and their log-probabilities."""
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        call = client.completions.create(model="tiny", prompt="x", logprobs=5, **request)
        task = asyncio.create_task(call)
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        top = [{"token_id": t, "logprob": -1.0 - i} for i, t in enumerate(tops)]
        logprobs = [{"token_id": i, "logprob": -0.5, "top": top} for i in text_ids]
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, text_ids, logprobs=logprobs, reason=2)
        return (await task).choices[0]


async def test_offsets_are_characters_of_the_text(frontend, scripted, encode):
    choice = await log_probabilities(frontend, scripted, [*encode("🎉🎉"), 257, *encode("a")])
    assert choice.text == "🎉🎉a"
    assert choice.logprobs.text_offset == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


async def test_alternatives_with_one_text_are_kept_apart(frontend, scripted, encode):
    parts = encode("🎉")
    choice = await log_probabilities(frontend, scripted, [parts[1]], [*parts, encode("a")[0]])
    assert choice.logprobs.tokens == [r"bytes:\x9f"]
    assert choice.logprobs.top_logprobs[0] == {
        r"bytes:\xf0": -1.0,
        r"bytes:\x9f": -2.0,
        r"bytes:\x8e": -3.0,
        r"bytes:\x89": -4.0,
        "a": -5.0,
    }


async def test_hidden_stop_strings_have_no_log_probabilities(frontend, scripted, encode):
    choice = await log_probabilities(frontend, scripted, encode("Hello there"), stop=["the"])
    assert choice.text == "Hello "
    assert "".join(choice.logprobs.tokens) == "Hello "
    assert choice.logprobs.text_offset == list(range(6))


async def test_tokens_that_cannot_be_are_told_by_the_client_s_names(frontend, scripted, post):
    async with frontend(scripted("a", vocab_size=258)) as (app, client):
        with pytest.raises(openai.BadRequestError, match=r"prompt must not spell 'qqq'") as one:
            await client.completions.create(model="tiny", prompt="aqqq")
        found = await post(f"{app.url}/detokenize", b'{"tokens": [5, 9999]}')
    assert one.value.param == "prompt"
    error = json.loads(found.body)["error"]
    assert (found.status, error["param"]) == (400, "tokens")
    assert error["message"].startswith("tokens must be in [0, 257]")
