from octavo.router.http.vocabulary import Vocabulary
from octavo.router.text.tokenizer import backend_pieces
from tests.router.conftest import byte_fallback_tokenizer, byte_level_tokenizer


def shown(tokenizer, text):
    vocabulary = Vocabulary(backend_pieces(tokenizer), frozenset())
    return [vocabulary.token(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]


def test_bytes_of_byte_level_tokens_are_the_text():
    for text in ("plain", "é日\n\x00 \x7f\xad", "qqq", "".join(map(chr, range(300)))):
        tokens = shown(byte_level_tokenizer(), text)
        assert b"".join(token.encoded for token in tokens) == text.encode()


def test_a_part_of_a_character_is_shown_as_such():
    tokens = shown(byte_level_tokenizer(), "é")
    assert [(token.text, token.encoded) for token in tokens] == [
        ("\ufffd", b"\xc3"),
        ("\ufffd", b"\xa9"),
    ]


def test_fallback_bytes():
    tokens = shown(byte_fallback_tokenizer(), "a€")
    assert b"".join(token.encoded for token in tokens).endswith("€".encode())
    assert tokens[-1].text == "\ufffd"


def test_special_tokens_are_spelt_out():
    vocabulary = Vocabulary(backend_pieces(byte_level_tokenizer()), frozenset({256}))
    assert vocabulary.token(256).text == "</s>"
    assert vocabulary.token(9999).text == ""
