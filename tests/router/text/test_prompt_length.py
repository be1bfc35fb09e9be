"""Only texts that are too long are refused before tokenization."""

import asyncio
import gc

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from octavo.common.models import resolve as models
from octavo.router.text import prompt_length, tokenization
from octavo.router.text.prompt_length import PIECE, max_token_bytes, may_fit
from octavo.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerateRequest, TokenizeRequest
from tests.router.conftest import TINY, byte_level_tokenizer

MIB = 1 << 20
texts = st.lists(
    st.tuples(st.sampled_from(["é!", "qqq", "</s>", "the ", "  ", "\n", "a", "日本", "ing", "'"])
              | st.text(max_size=4), st.integers(1, 20)),
    max_size=8,
).map(lambda parts: "".join(part * times for part, times in parts))  # fmt: skip


@given(text=texts)
def test_no_token_stands_for_more_bytes(text):
    tokenizer = byte_level_tokenizer()
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= max_token_bytes(tokenizer) * tokens


@pytest.mark.parametrize("name", sorted(TINY))
@given(text=texts)
def test_a_text_that_fits_is_never_refused(name, text):
    tokenizer = TINY[name]()

    def count(piece: str) -> int:
        return len(tokenizer.encode(piece, add_special_tokens=False).ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_length, "PIECE", 8)
        patch.setattr(prompt_length, "PIECE_TOKENS", 8)  # `</s>` may be cut at both ends
        patch.setattr(prompt_length, "CHARACTERS_PER_TOKEN", 0)
        assert may_fit(text, count(text), count)


def test_what_shortens_texts_has_no_bound():
    known = byte_level_tokenizer()
    assert max_token_bytes(known) == len("</s>")
    assert not any(max_token_bytes(TINY[name]()) for name in TINY if name != "byte_level")
    strips = byte_level_tokenizer()
    strips.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    normalizes = byte_level_tokenizer()
    normalizes.normalizer = normalizers.NFC()
    drops = byte_level_tokenizer()
    drops.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    splits = byte_level_tokenizer()
    splits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel()]
    )
    found = [max_token_bytes(tokenizer) for tokenizer in (strips, normalizes, drops, splits)]
    assert found == [None, None, None, 4]


@pytest.mark.few(2)
@pytest.mark.parametrize("text", ["A few words, and more of them. ", "日本", "x", " ", "\n\n"])
def test_counting_ends_where_it_is_too_much(text):
    tokenizer = tokenization._load(models.DEMO)
    counted = 0

    def count(piece: str) -> int:
        nonlocal counted
        counted += len(piece)
        return tokenizer._count(piece)

    assert not may_fit(text * (MIB // len(text)), 100, count)
    assert counted <= 3 * PIECE


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_long_texts_are_never_tokenized_whole(scripted, serve, monkeypatch):
    """A text that fits does not wait for them either; Tokenize accepts long texts."""
    lengths = []
    encode = tokenization.Tokenizer.encode

    def watched(tokenizer, text, **options):
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(tokenization.Tokenizer, "encode", watched)
    async with serve(scripted("abc")) as servers:
        await servers.up()
        text = "words " * (MIB // 2)
        chat = ChatPrompt(messages=[ChatMessage(role="user", content=text)])
        prompts = [{"text": text}] * 11 + [{"chat": chat}]
        calls = [servers.stub.Generate(GenerateRequest(**prompt)).read() for prompt in prompts]
        for error in await asyncio.gather(*map(refusal, calls)):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "at most 511 tokens" in error.details()
        assert sum(lengths) <= 2 * PIECE
        response = await servers.stub.Tokenize(TokenizeRequest(text=text[:MIB]))
        assert len(response.token_ids) == MIB


async def test_a_refused_request_is_not_kept(scripted, serve):
    """Not even until garbage is collected."""

    def requests() -> int:
        return sum(type(found) is GenerateRequest for found in gc.get_objects())

    async with serve(scripted("abc")) as servers:
        await servers.up()
        request = GenerateRequest(text="long " * 10_000)
        gc.collect()
        gc.disable()
        try:
            before = requests()
            for _ in range(10):
                await refusal(servers.stub.Generate(request).read())
            await servers.until(lambda: requests() <= before + 1, 5)
        finally:
            gc.enable()


async def test_a_chat_has_no_more_messages_than_tokens(scripted, serve):
    async with serve(scripted("abc")) as servers:
        await servers.up()
        chat = ChatPrompt(messages=[ChatMessage(role="user")] * 513)
        for call in (
            servers.stub.Generate(GenerateRequest(chat=chat)).read(),
            servers.stub.Tokenize(TokenizeRequest(chat=chat)),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "at most 512 entries" in error.details()
