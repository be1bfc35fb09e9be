"""An engine of a byte model, with defaults for tests."""

from tokenizers import pre_tokenizers

from benchmarks.fixture import EOS
from benchmarks.one_engine import OneEngine

SMALL = {"dtype": "float32", "num_blocks": 512, "max_model_len": 1024, "swap_space": 0.1}


class Runner(OneEngine):
    """An engine of the model of `benchmarks.fixture.make_model`, whose tokens are bytes."""

    def __init__(self, model: str, **settings):
        super().__init__(model, **(SMALL | settings))


def _alphabet() -> list[int]:
    """Return the byte of each token, in the order of `benchmarks.fixture.save_tokenizer`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    symbols |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return [symbols[symbol] for symbol in sorted(pre_tokenizers.ByteLevel.alphabet())]


BYTES = _alphabet()


def encode(text: str) -> list[int]:
    """Return the tokens of a text: one for each byte."""
    return [BYTES.index(byte) for byte in text.encode()]


def decode(token_ids) -> str:
    """Return the text of tokens, without the end."""
    return bytes(BYTES[token] for token in token_ids if token != EOS).decode()
