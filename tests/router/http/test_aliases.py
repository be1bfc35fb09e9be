"""A model that has several names."""

import openai
import pytest

NAMES = ("tiny", "gpt-4o", "org/tiny")


async def test_every_name_is_accepted_and_listed_over_http(scripted, frontend, hello):
    engine = scripted("a", aliases=NAMES[1:], max_model_len=300)
    async with frontend(engine) as (_, client):
        for name in NAMES:
            whole = await client.chat.completions.create(**{**hello, "model": name})
            assert (whole.model, whole.choices[0].message.content) == ("tiny", "a")
            stream = await client.chat.completions.create(**{**hello, "model": name}, stream=True)
            assert {chunk.model async for chunk in stream} == {"tiny"}
            card = await client.models.retrieve(name)
            assert (card.id, card.root, card.parent) == (name, "tiny", None)
            assert card.max_model_len == 300
        assert [card.id async for card in client.models.list()] == ["gpt-4o", "org/tiny", "tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")
