import asyncio

import pytest

from octavo.v1.sampling_pb2 import TokenLogprob, TopLogprob


async def test_a_whole_answer(frontend, scripted, hello):
    async with frontend(scripted("hello world", eos=True)) as (app, client):
        answer = await client.chat.completions.create(**hello)
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
        assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
        assert (answer.object, answer.model) == ("chat.completion", "tiny")
        assert answer.id.startswith("chatcmpl-")
        assert answer._request_id == answer.id
        assert answer.usage.prompt_tokens == len("<s>user:hi<s>assistant:") - 4  # <s> is one token
        assert answer.usage.completion_tokens == len("hello world") + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        await app.clean()


async def test_a_streamed_answer(frontend, scripted, hello):
    async with frontend(scripted("hello world")) as (_, client):
        stream = await client.chat.completions.create(
            **hello, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    for index in range(2):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "hello world"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 22


async def test_usage_in_every_chunk(frontend, scripted, hello):
    async with frontend(scripted("hello world")) as (_, client):
        stream = await client.chat.completions.create(
            **hello, stream=True, stream_options={"continuous_usage_stats": True}
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 11)


async def test_an_answer_is_a_message_of_the_next_request(frontend, scripted, hello):
    engine = scripted("a")
    async with frontend(engine) as (_, client):
        first = await client.chat.completions.create(**hello)
        messages = [*hello["messages"], first.choices[0].message]
        await client.chat.completions.create(model="tiny", messages=messages)
    assert len(engine.submits[1].prompt_token_ids) > len(engine.submits[0].prompt_token_ids)


async def test_content_in_parts_and_developers(frontend, scripted, encode):
    engine = scripted("a")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    async with frontend(engine) as (_, client):
        await client.chat.completions.create(model="tiny", messages=messages)
    expected = encode("<s>system:be<s>user:one\ntwo<s>assistant:")
    assert list(engine.submits[0].prompt_token_ids) == expected


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs(frontend, scripted, hello, encode, streamed):
    engine = scripted(interval=None)
    a, euro = encode("a"), encode("é")
    assert len(euro) == 2
    tokens = [
        TokenLogprob(token_id=a[0], logprob=-0.5, top=[TopLogprob(token_id=a[0], logprob=-0.5)]),
        TokenLogprob(token_id=euro[0], logprob=float("-inf")),
        TokenLogprob(token_id=euro[1], logprob=-1),
        TokenLogprob(token_id=256, logprob=-2),
    ]

    async def answer(app):
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        assert submit.output.logprobs == 1
        engine.send(started=[{"request_id": submit.request_id}])
        ids = [token.token_id for token in tokens]
        engine.send_tokens(submit.request_id, ids, logprobs=tokens, reason=1)

    async with frontend(engine) as (app, client):
        request = client.chat.completions.create(
            **hello, logprobs=True, top_logprobs=1, stream=streamed
        )
        got, _ = await asyncio.gather(request, answer(app))
        if streamed:
            choices = [chunk.choices[0] async for chunk in got]
            shown = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
            assert "".join(c.delta.content or "" for c in choices) == "aé"
        else:
            shown = got.choices[0].logprobs.content
            assert got.choices[0].message.content == "aé"
    assert [entry.token for entry in shown] == ["a", "\ufffd", "\ufffd"]
    assert [entry.bytes for entry in shown] == [[97], [0xC3], [0xA9]]
    assert [entry.logprob for entry in shown] == [-0.5, -9999, -1]
    assert [len(entry.top_logprobs) for entry in shown] == [1, 0, 0]


async def test_the_best_of_a_beam_search(frontend, scripted, hello, encode):
    engine = scripted(interval=None, features={"beam_search": True})

    async with frontend(engine) as (app, client):
        task = asyncio.create_task(
            client.chat.completions.create(**hello, n=2, extra_body={"beam_width": 3})
        )
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        assert submit.beam.width == 3
        assert not submit.HasField("sampling")
        engine.send(started=[{"request_id": submit.request_id}])
        for i in range(3):
            engine.send_tokens(submit.request_id, encode("abc"[i]), index=i, reason=2, score=-i)
        answer = await task
    assert [choice.message.content for choice in answer.choices] == ["a", "b"]
    assert answer.usage.completion_tokens == 3
