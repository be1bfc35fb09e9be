"""Loads a model's tokenizer so that its tokens match its tokenizer.json.

transformers rebuilds many tokenizers from their class, and ignores tokenizer.json's rules for
splitting, normalizing and decoding. Here the file decides:

- Text is encoded and decoded by the `tokenizers` library with this file. The file also defines the
  tokens, which of them are special, and those added around a text (`add_bos_token` and
  `add_eos_token` of tokenizer_config.json are ignored).
- transformers reads the rest: the chat templates, and the roles of special tokens, such as
  `bos_token`. Special tokens that the file lacks are dropped.

Without a tokenizer.json, transformers builds the tokenizer.

transformers would parse the file up to four times, which takes six seconds for 262,000 tokens, and
none of the result is used. So its class loads a copy that has only the added tokens.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from octavo.common.models.errors import ModelError
from octavo.common.models.tokenizer_files import TOKENIZER_JSON, check_tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger(__name__)

MAX_ADDED = 100
"""Number of added tokens to compare; some models have thousands of similar ones."""


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model's directory, without padding and truncation.

    Raises:
        ModelError: There is no tokenizer, or transformers' tokens differ from tokenizer.json's.
        OSError: A file cannot be read.
        Exception: A file cannot be read by transformers or tokenizers.
    """
    file = directory / TOKENIZER_JSON
    if not file.is_file():
        check_tokenizer_files(directory)
        return _by_class(directory)
    from tokenizers import Tokenizer  # noqa: PLC0415

    check_tokenizer_files(directory, unparsed=TOKENIZER_JSON)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception:
        check_tokenizer_files(directory)  # says which part is damaged, if it knows
        raise
    with _without_vocabulary(directory, backend) as small:
        return _as_in_file(small, _whole(backend), file)


@contextmanager
def _without_vocabulary(directory: Path, backend: Any) -> Iterator[Path]:  # noqa: ANN401
    """Lay out a tokenizer's files, but with a vocabulary of the added tokens alone.

    Args:
        directory: The model's directory.
        backend: Its tokenizer.json as a `tokenizers.Tokenizer`.
    """
    from tokenizers import Tokenizer, models  # noqa: PLC0415

    if isinstance(backend.model, models.Unigram):  # needs its vocabulary
        yield directory
        return
    added = backend.get_added_tokens_decoder()
    vocabulary = {token.content: i for i, token in added.items()}
    if (unknown := getattr(backend.model, "unk_token", None)) is not None:
        vocabulary.setdefault(unknown, backend.token_to_id(unknown) or 0)
    merges: tuple[list[Any], ...] = ([],) if isinstance(backend.model, models.BPE) else ()
    small = Tokenizer(type(backend.model)(vocabulary, *merges, unk_token=unknown))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(small, part, value)
    if backend.padding is not None:  # may name the padding token
        small.enable_padding(**backend.padding)
    small.add_special_tokens([token for token in added.values() if token.special])
    small.add_tokens([token for token in added.values() if not token.special])
    with TemporaryDirectory() as name:
        for file in directory.iterdir():
            if file.name != TOKENIZER_JSON:
                Path(name, file.name).symlink_to(file.absolute())
        small.save(str(Path(name, TOKENIZER_JSON)))
        yield Path(name)


def _by_class(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer with transformers."""
    # Imported here because most tokenizers do without it, and it is slow to import.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    loaded: PreTrainedTokenizerBase
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything
        if "trust_remote_code" in str(error) or not (directory / TOKENIZER_JSON).is_file():
            raise
        # The files' class does not fit this tokenizer.json, and is not needed.
        loaded = PreTrainedTokenizerFast.from_pretrained(directory)
    return loaded


def _as_in_file(directory: Path, backend: Any, file: Path) -> "PreTrainedTokenizerBase":  # noqa: ANN401
    """Load a directory's tokenizer with transformers, and set the file's tokens in it."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    loaded = _by_class(directory)
    if isinstance(loaded, PreTrainedTokenizerFast):
        try:
            return _with_tokens(loaded, backend, file)
        except ModelError:  # MBart's class changes its tokens at each call
            if type(loaded) is PreTrainedTokenizerFast:
                raise
            backend = _whole(type(backend).from_file(str(file)))
    return _with_tokens(PreTrainedTokenizerFast.from_pretrained(directory), backend, file)


def _with_tokens(loaded: Any, backend: Any, file: Path) -> "PreTrainedTokenizerBase":  # noqa: ANN401
    """Set a file's tokens in a tokenizer, and check that it keeps them."""
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
    _whole(backend)
    _tell_added(loaded, expected[1].tokens[0], file)
    checked: PreTrainedTokenizerBase = loaded
    return checked


def _whole(backend: Any) -> Any:  # noqa: ANN401 - tokenizers has no types
    """Let a tokenizer return texts whole and unpadded; return it."""
    backend.no_padding()
    backend.no_truncation()
    return backend


def _leave_out_unknown(loaded: Any, backend: Any, file: Path) -> None:  # noqa: ANN401
    """Drop special tokens that the file lacks: the model was not trained on them."""
    named = loaded.special_tokens_map
    unknown = {name: token for name, token in named.items() if backend.token_to_id(token) is None}
    for name in unknown:
        setattr(loaded, name, None)
    loaded.extra_special_tokens = [
        token for token in loaded.extra_special_tokens if backend.token_to_id(token) is not None
    ]
    if unknown:
        log.info("ignoring special tokens that tokenizer.json lacks", file=str(file), **unknown)


def _tell_added(loaded: Any, tokens: Sequence[int], file: Path) -> None:  # noqa: ANN401
    """Log if tokenizer_config.json requests a BOS token that tokenizer.json does not add."""
    bos = loaded.special_tokens_map.get("bos_token")
    if loaded.init_kwargs.get("add_bos_token") and bos is not None:
        bos_id = loaded.convert_tokens_to_ids(bos)
        if bos_id not in tokens:
            log.warning("ignoring add_bos_token: tokenizer.json decides", file=str(file))


class Texts(NamedTuple):
    """A tokenizer's results for sample texts.

    Attributes:
        tokens: Tokens of each text.
        decoded: Text decoded from each text's tokens.
    """

    tokens: list[list[int]]
    decoded: list[str]


def check_same(file: Path, texts: Sequence[str], found: Texts, expected: Texts) -> None:
    """Reject a tokenizer whose results differ from those of its tokenizer.json.

    Args:
        file: The tokenizer.json.
        texts: Sample texts.
        found: Results of the tokenizer to be used.
        expected: Results of the file.

    Raises:
        ModelError: The results differ; the message shows the first difference.
    """
    for text, ours, its in zip(texts, found.tokens, expected.tokens, strict=True):
        if ours != its:
            raise ModelError(
                f"{file} encodes differently from the loaded tokenizer:"
                f" {text!r} is {its}, not {ours}"
            )
    for tokens, decoded, right in zip(
        expected.tokens, found.decoded, expected.decoded, strict=True
    ):
        if decoded != right:
            raise ModelError(
                f"{file} decodes differently from the loaded tokenizer:"
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
    """Return about 200 sample texts: languages, numbers, lists, spaces, code, emoji, tokens."""
    return tuple(json.loads(Path(__file__).with_name("tokenizer_texts.json").read_text()))


def _texts(backend: Any) -> list[str]:  # noqa: ANN401
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    return [*sample_texts(), *(f"a{token} b" for token in added[:MAX_ADDED])]
