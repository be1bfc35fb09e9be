"""Tokenizers: encode texts and chats, decode tokens."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
from transformers import PreTrainedTokenizerBase

from octavo.common import background, limits, rpc
from octavo.common.background import ThreadPool
from octavo.common.models import resolve as models
from octavo.common.models.errors import ModelError, first_line
from octavo.common.models.tokenizer import load_tokenizer
from octavo.common.models.tokenizer_files import tokenizer_files
from octavo.router.tenants.tenant import Tenant
from octavo.router.text import prompt_length
from octavo.router.text.chat_template import MODELS_OWN, ServerTemplate
from octavo.router.text.control_tokens import ControlTokens
from octavo.router.text.detokenizer import Pieces
from octavo.router.text.fill_in_middle import fill_in_middle
from octavo.router.text.model_text import model_text
from octavo.router.text.rendering import ChatRenderer
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
"""Characters of whole texts that are tokenized in the event loop: handing them to a thread and back
takes longer."""
MAX_WAITING = 64 << 20
"""Maximum waiting characters or tokens of one tenant."""


Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Texts, or pairs of texts."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The tokens of texts or pairs.

    Attributes:
        token_ids: The token ids of each.
        second_lengths: How many tokens at each one's end are a pair's second text; empty if the
            model is not told.
    """

    token_ids: list[list[int]]
    second_lengths: list[int]


class Tokenizer:
    """One model's tokenizer.

    Fast tokenizers are called through their Rust object: transformers' calls set its padding and
    truncation each time, which is not thread-safe.

    Args:
        tokenizer: The transformers tokenizer.
        template: The server's settings of the chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: ServerTemplate = MODELS_OWN
    ) -> None:
        if template.text is not None:
            tokenizer.chat_template = template.text
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        self.pieces = self._make_pieces()
        self.model = model_text(tokenizer)
        self._tells_pairs = "token_type_ids" in tokenizer.model_input_names
        self._cutting: dict[int, Any] = {}  # copies of the backend, by their maximum of tokens
        self._renderer = ChatRenderer(tokenizer, self.model, template.variables)
        added = self._backend and self._backend.get_added_tokens_decoder()
        self._control = ControlTokens(added or tokenizer.added_tokens_decoder, self._backend)
        self._max_token_bytes = self._backend and prompt_length.max_token_bytes(self._backend)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Reject a text whose length alone proves that it has too many tokens.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT.
        """
        longest = self._max_token_bytes
        if longest is not None and len(text) > longest * max_tokens:
            raise limits.prompt_too_long(max_tokens)

    def encode_prompt(
        self,
        request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest,
        max_tokens: int | None,
        *,
        kept: int | None = None,
        allow_special_tokens: bool = False,
    ) -> list[int]:
        """Return the tokens of a request's text or chat.

        Args:
            request: A request whose prompt is a text or chat.
            max_tokens: Maximum tokens; None: unlimited.
            kept: Number of the last tokens to keep, whatever `max_tokens` says; None: all.
            allow_special_tokens: Whether a chat's texts may spell special tokens.

        Raises:
            rpc.RpcError: See `ChatRenderer.render`, `ControlTokens.encode` and `fill_in_middle`;
                INVALID_ARGUMENT if it is clear that they are more than `max_tokens`, before
                all are counted.
        """
        if kept is not None:
            whole = self.encode_prompt(request, None, allow_special_tokens=allow_special_tokens)
            lead = [] if request.HasField("chat") else self._special_tokens()[0]
            return last_tokens(whole, kept, lead)
        if isinstance(request, generation_pb2.GenerateRequest) and request.suffix:
            self._check_fits(request.text + request.suffix, max_tokens)
            lead, end = self._special_tokens()
            return [*lead, *self.fill_in_middle(request.text, request.suffix), *end]
        is_chat = request.WhichOneof("prompt") == "chat"
        adds = not is_chat  # chat templates write special tokens themselves
        if isinstance(request, generation_pb2.TokenizeRequest) and request.HasField(
            "add_special_tokens"
        ):
            adds = request.add_special_tokens
        if not is_chat:
            self._check_fits(request.text, max_tokens)
            return self.encode(request.text, add_special_tokens=adds)
        texts: list[str] = []

        def keep(text: str) -> str:
            texts.append(text)
            return text

        text = self._renderer.render(request.chat, keep)
        self._check_fits(text, max_tokens)
        if allow_special_tokens or not self._control.may_be_in(texts):
            return self.encode(text, add_special_tokens=adds)
        ids = self._control.encode(
            text, texts, lambda change: self._renderer.render(request.chat, change)
        )
        return self._between_special_tokens(ids) if adds else ids

    def encode_texts(self, texts: Texts, max_tokens: int, *, truncate: bool) -> EncodedTexts:
        """Return the token ids of texts or pairs, with the tokenizer's default special tokens.

        Args:
            texts: The texts, or pairs of texts.
            max_tokens: Maximum tokens of a text or pair.
            truncate: Whether to cut longer ones at their end, a pair's longer text first; else they
                are returned whole.
        """
        if self._backend is None:
            limits = {"truncation": "longest_first", "max_length": max_tokens} if truncate else {}
            parts = [(text,) if isinstance(text, str) else text for text in texts]
            made = [self._tokenizer(*each, **limits, return_token_type_ids=True) for each in parts]
            encoded = [(one["input_ids"], one["token_type_ids"]) for one in made]
        else:
            backend = self._cutting_at(max_tokens) if truncate else self._backend
            encoded = [(one.ids, one.type_ids) for one in backend.encode_batch_fast(texts)]
        second = [sum(types) for _, types in encoded] if self._tells_pairs else []
        return EncodedTexts([ids for ids, _ in encoded], second)

    def _cutting_at(self, max_tokens: int) -> Any:  # noqa: ANN401 - tokenizers has no types
        """Return a copy of the backend that cuts what is longer; other calls do not cut."""
        if (backend := self._cutting.get(max_tokens)) is None:
            backend = type(self._backend).from_str(self._backend.to_str())
            backend.enable_truncation(max_tokens, strategy="longest_first", direction="right")
            self._cutting[max_tokens] = backend
        return backend

    def encode_words(self, words: Iterable[str]) -> list[list[int]]:
        """Return the tokens of each word, without and with a space before it."""
        spellings = [s for word in words for s in (word.lstrip(), f" {word.lstrip()}")]
        encoded = [tuple(self.encode(s, add_special_tokens=False)) for s in spellings]
        return [list(token_ids) for token_ids in dict.fromkeys(encoded) if token_ids]

    def fill_in_middle(self, prefix: str, suffix: str) -> list[int]:
        """Return the tokens of a prompt whose output is the text between two texts.

        Raises:
            rpc.RpcError: UNIMPLEMENTED: the tokenizer has no tokens for that.
        """
        return fill_in_middle(
            self._tokenizer.get_added_vocab(),
            self.encode(prefix, add_special_tokens=False),
            self.encode(suffix, add_special_tokens=False),
        )

    def _between_special_tokens(self, token_ids: list[int]) -> list[int]:
        """Return a text's tokens, and the special tokens that the tokenizer adds to any text."""
        lead, end = self._special_tokens()
        return [*lead, *token_ids, *end]

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after any text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        start = whole.index(bare[0])
        return whole[:start], whole[start + len(bare) :]

    def _check_fits(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None:
            return
        self.check_length(text, max_tokens)
        if not prompt_length.may_fit(text, max_tokens, self._count):
            raise limits.prompt_too_long(max_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens, and the special tokens that the tokenizer adds by default."""
        if self._backend is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Unlike `encode`, this releases the GIL for other threads.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = encoding.ids
        return ids

    def render(self, chat: generation_pb2.ChatPrompt) -> str:
        """Render a chat; raise the errors of `ChatRenderer.render`."""
        return self._renderer.render(chat)

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""
        skip = not keep_special_tokens
        if self._backend is not None:
            # Unlike `decode`, this releases the GIL.
            text: str = self._backend.decode_batch([token_ids], skip_special_tokens=skip)[0]
        else:
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
        return text

    def _count(self, text: str) -> int:
        return len(self.encode(text, add_special_tokens=False))

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


def last_tokens(token_ids: Sequence[int], count: int, lead: Sequence[int]) -> list[int]:
    """Return a prompt's last tokens, and before them `lead` if the prompt begins with it.

    Args:
        token_ids: The prompt.
        count: Maximum number of tokens, those of `lead` included; at least 1.
        lead: Special tokens that the tokenizer puts before a text.
    """
    if len(token_ids) <= count:
        return list(token_ids)
    kept = list(lead) if len(lead) < count else []
    return [*kept, *token_ids[len(kept) - count :]]


def backend_pieces(backend: Any) -> Pieces:  # noqa: ANN401 - tokenizers has no types
    """Return the vocabulary of a `tokenizers.Tokenizer`."""
    added = backend.get_added_tokens_decoder()
    size = 1 + max(max(backend.get_vocab(with_added_tokens=True).values(), default=-1), *added, -1)
    return Pieces(
        lambda token_ids: backend.decode(token_ids, skip_special_tokens=True),
        [backend.id_to_token(i) for i in range(size)],
        frozenset(i for i, token in added.items() if token.special),
        byte_fallback='"ByteFallback"' in json.dumps(json.loads(backend.to_str())["decoder"]),
    )


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
        kept: int | None = None,
    ) -> list[int]:
        """Return the tokens of a request's text or chat.

        Args:
            tokenizer: The model's tokenizer.
            request: A request whose prompt is a text or chat.
            tenant: The request's tenant.
            max_tokens: Maximum tokens; a clearly longer text is not tokenized to its end. None:
                unlimited.
            kept: See `Tokenizer.encode_prompt`.

        Raises:
            rpc.RpcError: See `Tokenizer.encode_prompt` and `Turns.take`; PERMISSION_DENIED if the
                tenant's texts may not spell control tokens.
        """
        allowed = self._allows_special_tokens(request.chat, tenant)
        size = len(request.text)
        if request.WhichOneof("prompt") == "chat":
            size = sum(len(message.content) for message in request.chat.messages)
            size += request.chat.chat_template_kwargs.ByteSize()
        elif max_tokens is not None and kept is None:
            tokenizer.check_length(request.text, max_tokens)
        return await self._run(
            tenant,
            size,
            lambda: tokenizer.encode_prompt(
                request, max_tokens, kept=kept, allow_special_tokens=allowed
            ),
        )

    async def encode_words(
        self, tokenizer: Tokenizer, words: Sequence[str], tenant: Tenant
    ) -> list[list[int]]:
        """Return the tokens of words; see `Tokenizer.encode_words` and `Turns.take`."""
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
        """Return the tokens of texts or pairs; see `Tokenizer.encode_texts` and `Turns.take`."""
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
        """Return the tokens of pairs that the chat template lays out; see `Turns.take`.

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
        return EncodedTexts(token_ids, [])

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
        await self._turns.take(tenant, size)
        # The turn ends with the thread's work, even if the caller was cancelled before.
        job = background.start(self._threads.run(work), "tokenize")
        job.add_done_callback(lambda done: self._end(size, done))
        return await asyncio.shield(job)

    def _end(self, size: int, job: asyncio.Task[Any]) -> None:
        self._turns.give_back(size)
        if not job.cancelled():
            job.exception()  # retrieve it, as the caller may be gone


def _load(source: str, template: ServerTemplate = MODELS_OWN) -> Tokenizer:
    tokenizer = load_tokenizer(Path(models.resolve_tokenizer(source)))
    _check_vocabulary(tokenizer)
    return Tokenizer(tokenizer, template)


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer that transformers created without its vocabulary files.

    Raises:
        ModelError: It has only special tokens, and would encode any text as nothing.
    """
    special = set(tokenizer.all_special_tokens) | tokenizer.get_added_vocab().keys()
    if not tokenizer.get_vocab().keys() - special:
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
