"""Loads the models' tokenizers, and runs them in threads."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog
from transformers import PreTrainedTokenizerBase

from octavo.common import rpc
from octavo.common.background import ThreadPool
from octavo.common.models import resolve as models
from octavo.common.models.errors import ModelError, first_line
from octavo.common.models.image_families import reads_images
from octavo.common.models.tokenizer import load_tokenizer
from octavo.common.models.tokenizer_files import tokenizer_files
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.chat_template import MODELS_OWN, ServerTemplate
from octavo.router.text.tokenizer import EncodedTexts, Texts, Tokenizer
from octavo.router.text.turns import Turns
from octavo.v1 import generation_pb2

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")

_ELSEWHERE = "name another tokenizer with the router's --tokenizer"
"""What always helps."""
THREADS = 2
"""Number of tokenizer threads; more would slow the event loop."""
LONG = 256 << 10
"""Characters or tokens above which work never occupies all threads."""
SHORT = 1024
"""Characters of texts, but not of chats, that are tokenized in the event loop: handing them to a
thread and back takes longer."""
MAX_WAITING = 64 << 20
"""Maximum waiting characters or tokens of one tenant."""


class TokenizerError(ModelError):
    """A tokenizer cannot be loaded; the message names the cause and a remedy."""


class Tokenizers:
    """Loads each tokenizer once, and runs tokenizers in threads outside the event loop.

    Tenants take turns, so that one tenant's queue does not delay others.
    """

    def __init__(
        self,
        *,
        allow_special_tokens: bool = False,
        template: ServerTemplate = MODELS_OWN,
    ) -> None:
        """Create an empty set of tokenizers.

        Args:
            allow_special_tokens: Whether chat texts may spell control tokens.
            template: The server's settings of chat templates.
        """
        self._allow_special_tokens = allow_special_tokens
        self._template = template
        # One more thread than turns, to load a tokenizer while others work.
        self._threads = ThreadPool(THREADS + 1, "tokenizer")
        self._turns = Turns(THREADS, LONG, MAX_WAITING)
        self._loaded: dict[str, Tokenizer] = {}
        self._lock = asyncio.Lock()

    async def load(self, source: str) -> Tokenizer:
        """Return the tokenizer at `source`: a hub name, a directory or "demo".

        Raises:
            TokenizerError: No working tokenizer is there; the message says why.
        """
        async with self._lock:
            if source not in self._loaded:
                try:
                    self._loaded[source] = await self._threads.run(_load, source, self._template)
                except Exception as error:
                    raise TokenizerError(_explain(source, error)) from error
                log.info("tokenizer loaded", source=source)
            return self._loaded[source]

    async def encode(
        self,
        tokenizer: Tokenizer,
        request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest,
        tenant: Tenant,
        max_tokens: int | None = None,
        *,
        kept: int | None = None,
        images: Sequence[str] = (),
    ) -> list[int]:
        """Return the tokens of a request's text or chat.

        Args:
            tokenizer: The model's tokenizer.
            request: A request whose prompt is a text or chat.
            tenant: The request's tenant.
            max_tokens: Maximum tokens; a clearly longer text is not tokenized to its end. None:
                unlimited.
            kept: See `Tokenizer.encode_prompt`.
            images: See `Tokenizer.encode_prompt`.

        Raises:
            rpc.RpcError: See `Tokenizer.encode_prompt` and `Turns.run`; PERMISSION_DENIED if the
                tenant's texts may not spell control tokens.
        """
        allowed = self._allows_special_tokens(request.chat, tenant)

        def encode() -> list[int]:
            return tokenizer.encode_prompt(
                request, max_tokens, kept=kept, allow_special_tokens=allowed, images=images
            )

        if request.WhichOneof("prompt") == "chat":
            size = sum(len(message.content) for message in request.chat.messages)
            size += request.chat.chat_template_kwargs.ByteSize()
            return await self._run(tenant, size, encode)
        size = len(request.text)
        if isinstance(request, generation_pb2.GenerateRequest):
            size += len(request.suffix)
        if max_tokens is not None and kept is None:
            tokenizer.check_length(request.text, max_tokens)
        return encode() if size <= SHORT else await self._run(tenant, size, encode)

    async def encode_words(
        self, tokenizer: Tokenizer, words: Sequence[str], tenant: Tenant
    ) -> list[list[int]]:
        """Return the tokens of words; see `Tokenizer.encode_words` and `Turns.run`."""
        if not words:
            return []
        size = sum(map(len, words))
        return await self._run(tenant, size, lambda: tokenizer.encode_words(words))

    async def encode_texts(
        self,
        tokenizer: Tokenizer,
        texts: Texts,
        tenant: Tenant,
        max_tokens: int,
        *,
        truncate: bool,
    ) -> EncodedTexts:
        """Return the tokens of texts or pairs; see `Tokenizer.encode_texts` and `Turns.run`."""
        size = sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)

        def encode() -> EncodedTexts:
            return tokenizer.encode_texts(texts, max_tokens, truncate=truncate)

        return encode() if size <= SHORT else await self._run(tenant, size, encode)

    async def encode_pairs(
        self,
        tokenizer: Tokenizer,
        pairs: Sequence[tuple[str, str]],
        tenant: Tenant,
        *,
        system: str,
        opens: bool,
    ) -> EncodedTexts:
        """Return the tokens of pairs that the chat template lays out; see `Turns.run`.

        Args:
            tokenizer: The model's tokenizer.
            pairs: Queries and documents.
            tenant: The request's tenant.
            system: The system message; empty: none.
            opens: Whether the template opens the answer.

        Raises:
            rpc.RpcError: See `Tokenizer.encode_prompt`; FAILED_PRECONDITION if the template leaves
                out texts of such roles.
        """

        def encode(pair: tuple[str, str]) -> list[int]:
            roles = ("system", "query", "document")
            messages = [
                generation_pb2.ChatMessage(role=role, content=text)
                for role, text in zip(roles, (system, *pair), strict=True)
                if text
            ]
            chat = generation_pb2.ChatPrompt(messages=messages, add_generation_prompt=opens)
            shown = tokenizer.render(chat)
            if not all(text.strip() in shown for text in pair):
                raise rpc.precondition(
                    "model", "the model's chat template does not show queries and documents"
                )
            return tokenizer.encode_prompt(generation_pb2.TokenizeRequest(chat=chat), None)

        size = sum(len(text) for pair in pairs for text in pair)
        token_ids = await self._run(tenant, size, lambda: list(map(encode, pairs)))
        return token_ids, []

    def _allows_special_tokens(self, chat: generation_pb2.ChatPrompt, tenant: Tenant) -> bool:
        requested = chat.allow_special_tokens if chat.HasField("allow_special_tokens") else None
        if requested and not (self._allow_special_tokens or tenant.allow_special_tokens):
            raise rpc.denied(
                "chat.allow_special_tokens is not allowed: it needs the router's"
                " --allow-special-tokens, or a tenant with allow_special_tokens = true",
                "chat.allow_special_tokens",
            )
        return self._allow_special_tokens if requested is None else requested

    async def decode(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        tenant: Tenant,
        *,
        keep_special_tokens: bool,
    ) -> str:
        """Return the text of `token_ids`."""
        return await self._run(
            tenant,
            len(token_ids),
            lambda: tokenizer.decode(token_ids, keep_special_tokens=keep_special_tokens),
        )

    def close(self) -> None:
        """Stop the threads without waiting for running work."""
        self._threads.close()

    async def _run(self, tenant: Tenant, size: int, work: Callable[[], _Result]) -> _Result:
        return await self._turns.run(tenant, size, lambda: self._threads.run(work), "tokenize")


def _load(source: str, template: ServerTemplate = MODELS_OWN) -> Tokenizer:
    directory = Path(models.resolve_tokenizer(source))
    tokenizer = load_tokenizer(directory)
    _check_vocabulary(tokenizer)
    images = None
    if reads_images(directory):
        from octavo.router.images.processor import load_processor  # noqa: PLC0415 - slow to import

        images = load_processor(directory, tokenizer)
    return Tokenizer(tokenizer, template, images)


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer that transformers created without its vocabulary files.

    Raises:
        ModelError: It has only special tokens, and would encode any text as nothing.
    """
    special = set(tokenizer.all_special_tokens) | tokenizer.get_added_vocab().keys()
    if len(tokenizer) <= len(special):
        raise ModelError("it has special tokens only: download the files of its vocabulary")


def _explain(source: str, error: Exception) -> str:
    """Return why a tokenizer cannot be loaded, and which files exist."""
    if isinstance(error, ModelError):
        return f"the tokenizer {source!r} cannot be loaded: {error}; or {_ELSEWHERE}"
    why = f"{type(error).__name__}: {first_line(error)}"
    if "custom code" in why:
        why = "it needs Python code of its own, which Octavo does not run"
    reason = ""
    directory = Path(source).expanduser()
    if directory.is_dir():
        sizes = [f"{f.name} ({f.stat().st_size} bytes)" for f in tokenizer_files(directory)]
        reason = f"; {directory} has {', '.join(sizes)}"
    return (
        f"the tokenizer {source!r} cannot be loaded ({why}){reason}; repair its files, or"
        f" {_ELSEWHERE}"
    )
