import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.common.models.errors import ModelError
from octavo.engine.models.resolve_or_convert import resolve
from octavo.router.text.detokenizer import REPLACEMENT, Detokenizer
from octavo.router.text.tokenization import Tokenizers
from octavo.router.text.tokenizer import Tokenizer, backend_pieces


def stream(pieces, token_ids, **options) -> list[str]:
    detokenizer = Detokenizer(pieces, **options)
    return [*(detokenizer.feed(i) for i in token_ids), detokenizer.flush()]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_equals_decoding_at_once(tiny, data):
    """Draw any ids, including special and missing ones."""
    size = tiny.get_vocab_size() + 3
    token_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    shown = stream(backend_pieces(tiny), token_ids)
    assert "".join(shown) == tiny.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("tiny", ["byte_level", "byte_fallback", "metaspace"], indirect=True)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_special_tokens_are_kept_as_they_are_spelt(tiny, data):
    ids = st.integers(0, tiny.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(st.one_of(ids, st.sampled_from(specials(tiny))), max_size=60))
    shown = stream(backend_pieces(tiny), token_ids, keep_special=True)
    assert "".join(shown) == tiny.decode(token_ids, skip_special_tokens=False)


def specials(tokenizer) -> list[int]:
    return [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_character_is_split(tiny, text):
    pieces = backend_pieces(tiny)
    token_ids = tiny.encode(text, add_special_tokens=False).ids
    whole = tiny.decode(token_ids, skip_special_tokens=True)
    shown = stream(pieces, token_ids)
    assert "".join(shown) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in part for part in shown)


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        directory = resolve("demo")
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    return Tokenizer(AutoTokenizer.from_pretrained(directory))


@given(token_ids=st.lists(st.integers(0, 49151) | st.integers(0, 400), max_size=80))
@settings(max_examples=300, deadline=None)
def test_equals_decoding_at_once_with_a_real_tokenizer(smollm, token_ids):
    whole = smollm._tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(smollm.pieces, token_ids)) == whole


@given(text=st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_real_text_comes_back(smollm, text):
    token_ids = smollm.encode(text)
    assert token_ids == smollm._tokenizer.encode(text)
    assert "".join(stream(smollm.pieces, token_ids)) == smollm.decode(token_ids)


def test_text_is_shown_as_soon_as_it_is_whole(smollm):
    text = "It cost 5 €: naïve 日本語 🎉 fin"
    detokenizer = Detokenizer(smollm.pieces)
    fed: list[int] = []
    shown = ""
    for token_id in smollm.encode(text):
        fed.append(token_id)
        shown += detokenizer.feed(token_id)
        assert shown == smollm.decode(fed).rstrip(REPLACEMENT)
    assert shown == text


@pytest.mark.parametrize("byte", ["ÿ", "Ģ", "â"])
def test_cost_of_bytes_that_never_make_a_character(byte):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers import models as backend_models

    tokenizer = Backend(backend_models.BPE(vocab={byte: 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    token_ids = [0] * 5000
    began = time.process_time()
    shown = stream(backend_pieces(tokenizer), token_ids)
    assert time.process_time() - began < 2
    assert "".join(shown) == tokenizer.decode(token_ids)
    assert max(map(len, shown)) <= 40


@pytest.mark.parametrize("tiny", ["byte_fallback"], indirect=True)
def test_long_row_of_fallback_bytes_is_not_held_to_its_end(tiny):
    token_ids = [tiny.token_to_id(f"<0x{b:02X}>") for b in "🎉".encode() * 100]
    shown = stream(backend_pieces(tiny), token_ids)
    assert "".join(shown) == tiny.decode(token_ids)
    assert any(shown[:100])


async def test_tokenizers_load_once(tokenizer_dir):
    tokenizers = Tokenizers()
    first = await tokenizers.load(tokenizer_dir)
    assert await tokenizers.load(tokenizer_dir) is first
    tokenizers.close()
