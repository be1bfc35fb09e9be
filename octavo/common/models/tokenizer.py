"""Load a model's tokenizer, so that its tokens are those of its tokenizer.json.

transformers makes many tokenizers anew by their class and leaves out what tokenizer.json says of
splitting, normalizing and decoding. Here the file decides:

- Text is encoded and decoded as the `tokenizers` library does with the file. That includes the
  tokens that are added around a text (`add_bos_token` and `add_eos_token` of
  tokenizer_config.json have no say), which tokens there are, and which of them are special.
- transformers reads the rest: the chat templates, and what the special tokens are called, such as
  `bos_token`. A special token that the file does not have is left out.

Without a tokenizer.json the tokenizer is the one that transformers makes.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from octavo.common.models.errors import ModelError
from octavo.common.models.tokenizer_files import TOKENIZER_JSON, check_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger(__name__)

MAX_ADDED = 100
"""Added tokens that are compared; some models have thousands, all alike."""


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model's directory, with no padding and no truncation.

    Raises:
        ModelError: There is none, or transformers makes other tokens than tokenizer.json.
        OSError: A file cannot be read.
        Exception: A file cannot be read by transformers or tokenizers.
    """
    check_tokenizer_files(directory)
    loaded = _by_class(directory)
    file = directory / TOKENIZER_JSON
    return _as_in_file(loaded, file) if file.is_file() else loaded


def _by_class(directory: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that transformers makes."""
    # Imported here because most tokenizers do without it, and it is slow to import.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    loaded: PreTrainedTokenizerBase
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers raises what it likes
        if "trust_remote_code" in str(error) or not (directory / TOKENIZER_JSON).is_file():
            raise
        # The class that the files name cannot be made of this tokenizer.json: none is needed.
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
    return loaded


def _as_in_file(loaded: Any, file: Path) -> "PreTrainedTokenizerBase":  # noqa: ANN401
    """Give transformers' tokenizer the tokens of its file."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    if isinstance(loaded, PreTrainedTokenizerFast):
        try:
            return _with_tokens(loaded, file)
        except ModelError:  # MBart's class changes its tokens with each call
            if type(loaded) is PreTrainedTokenizerFast:
                raise
    return _with_tokens(PreTrainedTokenizerFast.from_pretrained(file.parent), file)


def _with_tokens(loaded: Any, file: Path) -> "PreTrainedTokenizerBase":  # noqa: ANN401
    """Give a tokenizer the tokens of a file, and check that it keeps them."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    backend = Tokenizer.from_file(str(file))
    backend.no_padding()
    backend.no_truncation()
    texts = _texts(backend)
    expected = [_by_file(backend, texts, special=special) for special in (False, True)]

    loaded._tokenizer = backend  # noqa: SLF001 - transformers itself sets it so
    # Both would make transformers' own calls differ from the file.
    loaded.clean_up_tokenization_spaces = False
    loaded.split_special_tokens = False
    _leave_out_unknown(loaded, backend, file)
    for special, one in zip((False, True), expected, strict=True):
        ids = _by_transformers(loaded, texts, one.tokens, special=special)
        check_same(file, texts, ids, one)
    backend.no_padding()
    backend.no_truncation()
    _tell_added(loaded, expected[1].tokens[0], file)
    checked: PreTrainedTokenizerBase = loaded
    return checked


def _leave_out_unknown(loaded: Any, backend: Any, file: Path) -> None:  # noqa: ANN401
    """Leave out special tokens that the file does not have: the model was not trained on them."""
    named = loaded.special_tokens_map
    unknown = {name: token for name, token in named.items() if backend.token_to_id(token) is None}
    for name in unknown:
        setattr(loaded, name, None)
    loaded.extra_special_tokens = [
        token for token in loaded.extra_special_tokens if backend.token_to_id(token) is not None
    ]
    if unknown:
        log.info("special tokens that tokenizer.json lacks are not used", file=str(file), **unknown)


def _tell_added(loaded: Any, tokens: Sequence[int], file: Path) -> None:  # noqa: ANN401
    """Log it if tokenizer_config.json asks for a BOS token that tokenizer.json does not add."""
    bos = loaded.special_tokens_map.get("bos_token")
    if loaded.init_kwargs.get("add_bos_token") and bos is not None:
        bos_id = loaded.convert_tokens_to_ids(bos)
        if bos_id not in tokens:
            log.warning("add_bos_token is not used: tokenizer.json decides", file=str(file))


class Texts(NamedTuple):
    """What a tokenizer makes of some texts.

    Attributes:
        tokens: Each text's tokens.
        decoded: The texts of those tokens.
    """

    tokens: list[list[int]]
    decoded: list[str]


def check_same(file: Path, texts: Sequence[str], found: Texts, expected: Texts) -> None:
    """Refuse a tokenizer that is not as its tokenizer.json.

    Args:
        file: The tokenizer.json.
        texts: The texts that were encoded.
        found: Their tokens by the tokenizer that will be used.
        expected: Their tokens by the file.

    Raises:
        ModelError: The first difference, with both lists of tokens or both texts.
    """
    for text, ours, its in zip(texts, found.tokens, expected.tokens, strict=True):
        if ours != its:
            raise ModelError(
                f"{file} makes other tokens than the tokenizer that would be used:"
                f" {text!r} is {its}, not {ours}"
            )
    for tokens, decoded, right in zip(
        expected.tokens, found.decoded, expected.decoded, strict=True
    ):
        if decoded != right:
            raise ModelError(
                f"{file} makes other texts than the tokenizer that would be used:"
                f" {tokens} is {right!r}, not {decoded!r}"
            )


def _by_file(backend: Any, texts: Sequence[str], *, special: bool) -> Texts:  # noqa: ANN401
    encodings = backend.encode_batch(texts, add_special_tokens=special)
    tokens = [encoding.ids for encoding in encodings]
    return Texts(tokens, backend.decode_batch(tokens, skip_special_tokens=special))


def _by_transformers(
    loaded: Any,  # noqa: ANN401
    texts: Sequence[str],
    tokens: Sequence[list[int]],
    *,
    special: bool,
) -> Texts:
    encoded = loaded(list(texts), add_special_tokens=special, verbose=False)["input_ids"]
    return Texts(encoded, [loaded.decode(ids, skip_special_tokens=special) for ids in tokens])


@cache
def sample_texts() -> tuple[str, ...]:
    """Return about 200 texts: languages, numbers, lists, spaces, code, emoji, control tokens."""
    return tuple(json.loads(Path(__file__).with_name("tokenizer_texts.json").read_text()))


def _texts(backend: Any) -> list[str]:  # noqa: ANN401
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    return [*sample_texts(), *(f"a{token} b" for token in added[:MAX_ADDED])]
