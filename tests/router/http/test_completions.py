import asyncio

import pytest


@pytest.fixture
def count(scripted):
    """An engine that says each prompt's last token, then the output's number."""
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
    assert choice.logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}] * 3


async def test_one_bad_prompt_fails_all(frontend, count):
    async with frontend(count) as (app, client):
        with pytest.raises(Exception, match="prompt must have at least one character") as caught:
            await client.completions.create(model="tiny", prompt=["good", ""])
        assert caught.value.param == "prompt"
        await app.clean()
