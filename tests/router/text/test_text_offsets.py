"""A token's offset is the number of characters before it in the shown text."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.router.text.detokenizer import Detokenizer
from octavo.router.text.text_offsets import TextOffsets
from octavo.router.text.tokenizer import backend_pieces
from tests.router.conftest import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
FALLBACK = byte_fallback_tokenizer()
PIECES = backend_pieces(BYTE_LEVEL)


def places(pieces, token_ids, **options):
    counted = TextOffsets(pieces, **options)
    return [counted.next(token_id) for token_id in token_ids]


def shown(pieces, token_ids, **options):
    detokenizer = Detokenizer(pieces, **options)
    return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()


def bytes_of(tokenizer, text):
    vocab = tokenizer.get_vocab()
    if "<0xE2>" in vocab:
        return [vocab[f"<0x{byte:02X}>"] for byte in text.encode()]
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_tokens_within_a_character_are_where_it_is():
    for tokenizer in (BYTE_LEVEL, FALLBACK):
        token_ids = bytes_of(tokenizer, "🎉🎉")
        found = places(backend_pieces(tokenizer), token_ids)
        assert found == [0, 0, 0, 0, 1, 1, 1, 1]


def test_hidden_tokens_take_no_place():
    end = BYTE_LEVEL.token_to_id("</s>")
    token_ids = [end, *bytes_of(BYTE_LEVEL, "ab"), end, *bytes_of(BYTE_LEVEL, "c")]
    assert places(PIECES, token_ids, before=5) == [5, 5, 6, 7, 7]
    assert places(PIECES, token_ids, keep_special=True) == [0, 4, 5, 6, 10]


@given(st.text(max_size=12), st.sampled_from([BYTE_LEVEL, FALLBACK]))
def test_each_place_is_the_number_of_whole_characters_before(text, tokenizer):
    pieces, token_ids = backend_pieces(tokenizer), bytes_of(tokenizer, text)
    lengths = [len(character.encode()) for character in text]
    expected = [i for i, length in enumerate(lengths) for _ in range(length)]
    whole = shown(pieces, token_ids)
    found = places(pieces, token_ids)
    if len(token_ids) == len(expected) and whole == text:  # one token per byte
        assert found == expected
    assert found == sorted(found)
    assert max(found, default=0) <= len(whole)


@given(st.lists(st.integers(0, 260), max_size=20))
def test_places_of_any_tokens_are_in_order_and_within_the_text(token_ids):
    found = places(PIECES, token_ids)
    assert found == sorted(found)
    assert max(found, default=0) <= len(shown(PIECES, token_ids))
    for i, place in enumerate(found):
        assert (
            shown(PIECES, token_ids[:i])
            .rstrip("\ufffd")
            .startswith(shown(PIECES, token_ids)[:place].rstrip("\ufffd"))
        )
