"""vLLM's arguments about tokens: their ids, scores of prompts, tokens that are allowed or not."""

import asyncio

import openai
import pytest


async def test_token_ids_of_a_chat(frontend, scripted, hello, encode):
    engine = scripted("hé", eos=True)
    async with frontend(engine) as (_, client):
        extra = {"extra_body": {"return_token_ids": True}}
        whole = await client.chat.completions.create(**hello, **extra)
        stream = await client.chat.completions.create(**hello, **extra, stream=True)
        chunks = [chunk async for chunk in stream]
    ids, prompt = [*encode("hé"), 256], encode("<s>user:hi<s>assistant:")
    assert (whole.prompt_token_ids, whole.choices[0].token_ids) == (prompt, ids)
    assert chunks[0].prompt_token_ids == prompt
    shown = [t for c in chunks for t in getattr(c.choices[0], "token_ids", ())]
    assert shown == ids
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hé"


async def test_token_ids_of_completions(frontend, scripted, encode):
    engine = scripted("hé", eos=True)
    async with frontend(engine) as (_, client):
        asked = {"model": "tiny", "prompt": ["xy", "z"], "extra_body": {"return_token_ids": True}}
        whole = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    for index, prompt in enumerate(("xy", "z")):
        choice = whole.choices[index]
        assert (choice.prompt_token_ids, choice.token_ids) == (encode(prompt), [*encode("hé"), 256])
        first, *rest = [choice for choice in choices if choice.index == index]
        assert first.prompt_token_ids == encode(prompt)
        assert [t for c in rest for t in getattr(c, "token_ids", ())] == [*encode("hé"), 256]


async def test_scores_of_prompts(frontend, scripted, hello, encode):
    engine = scripted(interval=None)

    async def play(app, number: int) -> None:
        await app.until(lambda: len(engine.submits) > number)
        submit = engine.submits[number]
        assert submit.output.prompt_logprobs == 1
        top = [{"token_id": encode("z")[0], "logprob": -0.1}]
        scores = [
            {"token_id": i, "logprob": -0.25, "top": top} for i in submit.prompt_token_ids[1:]
        ]
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, encode("a"), reason=2, prompt_logprobs=scores)

    async with frontend(engine) as (app, client):
        extra = {"extra_body": {"prompt_logprobs": 1}}
        call = client.completions.create(model="tiny", prompt="xy", **extra)
        task = asyncio.create_task(call)
        await play(app, 0)
        first, second = (await task).choices[0].prompt_logprobs
        assert first is None
        assert second == {
            str(encode("y")[0]): {"logprob": -0.25, "rank": None, "decoded_token": "y"},
            str(encode("z")[0]): {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": "z"},
        }
        task = asyncio.create_task(client.chat.completions.create(**hello, **extra))
        await play(app, 1)
        assert len((await task).prompt_logprobs) == len(encode("<s>user:hi<s>assistant:"))
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            await client.completions.create(model="tiny", prompt="x", stream=True, **extra)


async def test_tokens_that_are_allowed_or_not(frontend, scripted, encode):
    engine = scripted("a", features={"beam_search": True})
    async with frontend(engine) as (_, client):
        words = {"allowed_token_ids": [65, 66], "bad_words": [" no", "é!", "x"]}
        await client.completions.create(model="tiny", prompt="xy", extra_body=words)
        for extra, param in (
            ({"allowed_token_ids": [260]}, "allowed_token_ids"),
            ({"bad_words": [""]}, "bad_words"),
            ({"bad_words": ["x"] * 129}, "bad_words"),
            ({"bad_words": ["x"], "beam_width": 2}, "bad_words"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="tiny", prompt="xy", extra_body=extra)
            assert caught.value.param == param
    (submit,) = engine.submits
    assert list(submit.sampling.allowed_token_ids) == [65, 66]
    spelled = [encode(text) for text in ("no", " no", "é!", " é!", "x", " x")]
    assert [list(word.token_ids) for word in submit.bad_words] == spelled


async def test_long_prompts_keep_their_ends(frontend, scripted, hello, encode):
    engine = scripted("a")
    async with frontend(engine) as (_, client):
        for prompt, kept, expected in (
            ("abcdef", 2, "ef"),
            (encode("abcdef"), 4, "cdef"),
            ("abc", 9, "abc"),
            ("a" * 600 + "b", -1, "a" * 495 + "b"),  # leaves room for 16 tokens
        ):
            await client.completions.create(
                model="tiny", prompt=prompt, extra_body={"truncate_prompt_tokens": kept}
            )
            assert list(engine.submits[-1].prompt_token_ids) == encode(expected)
        await client.chat.completions.create(**hello, extra_body={"truncate_prompt_tokens": 3})
        assert list(engine.submits[-1].prompt_token_ids) == encode("nt:")
