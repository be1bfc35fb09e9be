"""Tokenizers: text and chats into tokens, tokens into text."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import structlog
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from octavo.common import models, rpc
from octavo.common.background import Workers
from octavo.v1 import generation_pb2
from router.detokenizer import Pieces

log = structlog.get_logger(__name__)

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "spiece*")
"""Names of a tokenizer's files."""
THREADS = 2
"""Tokenization beside the event loop; more would only take time from it."""


class Tokenizer:
    """One model's tokenizer.

    Fast tokenizers are used through their Rust object: transformers' own calls
    set its padding and truncation anew each time, which no second thread may
    be in the way of.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        self.pieces = self._make_pieces()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of `text`, with those that the tokenizer adds by default."""
        if self._backend is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Unlike `encode`, it lets other threads run, the event loop's among them.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
        return ids

    def encode_chat(self, chat: generation_pb2.ChatPrompt) -> list[int]:
        """Returns the tokens of a chat laid out by the model's template, answer begun.

        Raises:
            rpc.RpcError: FAILED_PRECONDITION if the model has no template,
                INVALID_ARGUMENT with the template's message if it refuses the chat.
        """
        if not self._tokenizer.chat_template:
            raise rpc.precondition(
                "chat", "the model has no chat template; send the prompt as text or tokens"
            )
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise rpc.invalid(
                "chat.messages", f"the model's chat template refuses chat.messages: {error}"
            ) from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Returns the text of `token_ids`."""
        skip = not keep_special_tokens
        if self._backend is not None:
            # Unlike `decode`, it lets other threads run.
            text: str = self._backend.decode_batch([token_ids], skip_special_tokens=skip)[0]
        else:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        return text

    def _make_pieces(self) -> Pieces:
        if self._backend is not None:
            return backend_pieces(self._backend)
        ids = range(len(self._tokenizer))
        return Pieces(
            self.decode,
            self._tokenizer.convert_ids_to_tokens(list(ids)),
            frozenset(self._tokenizer.all_special_ids),
            byte_fallback=True,
        )


def backend_pieces(backend: Any) -> Pieces:  # noqa: ANN401 - tokenizers has no types
    """Returns the pieces of a `tokenizers.Tokenizer`."""
    added = backend.get_added_tokens_decoder()
    size = 1 + max(max(backend.get_vocab(with_added_tokens=True).values(), default=-1), *added, -1)
    return Pieces(
        lambda token_ids: backend.decode(token_ids, skip_special_tokens=True),
        [backend.id_to_token(i) for i in range(size)],
        frozenset(i for i, token in added.items() if token.special),
        byte_fallback='"ByteFallback"' in json.dumps(json.loads(backend.to_str())["decoder"]),
    )


class TokenizerError(models.ModelError):
    """A tokenizer cannot be loaded. The message says what was found and what to do."""


class Tokenizers:
    """Loads tokenizers, each once, and runs them in threads beside the event loop."""

    def __init__(self) -> None:
        self._threads = Workers(THREADS, "tokenizer")
        self._loaded: dict[str, Tokenizer] = {}
        self._lock = asyncio.Lock()

    async def load(self, source: str) -> Tokenizer:
        """Returns the tokenizer at `source`: a hub name, a directory or "demo".

        Raises:
            TokenizerError: There is none that works; the message says what was found.
        """
        async with self._lock:
            if source not in self._loaded:
                try:
                    self._loaded[source] = await self._run(_load, source)
                except Exception as error:
                    raise TokenizerError(_explain(source, error)) from error
                log.info("tokenizer_loaded", source=source)
            return self._loaded[source]

    async def encode(
        self,
        tokenizer: Tokenizer,
        request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest,
    ) -> list[int]:
        """Returns the tokens of a request's text or chat.

        Raises:
            rpc.RpcError: As `Tokenizer.encode_chat`.
        """
        if request.WhichOneof("prompt") == "chat":
            return await self._run(tokenizer.encode_chat, request.chat)
        return await self._run(tokenizer.encode, request.text)

    async def decode(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], *, keep_special_tokens: bool
    ) -> str:
        """Returns the text of `token_ids`."""
        return await self._run(
            lambda ids: tokenizer.decode(ids, keep_special_tokens=keep_special_tokens), token_ids
        )

    def close(self) -> None:
        """Ends the threads; what they still do is not waited for."""
        self._threads.close()

    async def _run(self, function: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
        return await self._threads.run(function, argument)


def _load(source: str) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(models.resolve(source)))


def is_local(source: str) -> bool:
    """Tell whether a tokenizer's files are on this machine, by its source."""
    return source == models.DEMO or Path(source).expanduser().exists()


def _explain(source: str, error: Exception) -> str:
    """Say why a tokenizer cannot be loaded, and which files there are."""
    why = f"{type(error).__name__}: {models.first_line(error)}"
    found = ""
    directory = Path(source).expanduser()
    if directory.is_dir():
        names = {file.name: file for pattern in FILES for file in directory.glob(pattern)}
        sizes = [f"{name} ({file.stat().st_size} bytes)" for name, file in sorted(names.items())]
        found = f"; {directory} has {', '.join(sizes) or 'no file of a tokenizer'}"
    return (
        f"the tokenizer {source!r} cannot be loaded ({why}){found}; repair its files, or name "
        "another tokenizer with --tokenizer"
    )
