"""One model's tokenizer: encodes texts and chats, decodes tokens."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from octavo.common import limits, rpc
from octavo.router.text import prompt_length
from octavo.router.text.chat_template import MODELS_OWN, ServerTemplate
from octavo.router.text.control_tokens import Change, ControlTokens
from octavo.router.text.detokenizer import Pieces
from octavo.router.text.fill_in_middle import fill_in_middle
from octavo.router.text.model_text import model_text
from octavo.router.text.rendering import ChatRenderer
from octavo.v1 import generation_pb2

if TYPE_CHECKING:  # slow to import
    from octavo.router.images.processor import ImageProcessor

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Texts, or pairs of texts."""
EncodedTexts = tuple[list[list[int]], list[int]]
"""The tokens of each text or pair, and how many at each one's end are a pair's second text; the
latter empty if the model is not told."""


class Tokenizer:
    """One model's tokenizer.

    Fast tokenizers are called through their Rust object: transformers' calls set its padding and
    truncation each time, which is not thread-safe.

    Args:
        tokenizer: The transformers tokenizer.
        template: The server's settings of the chat template.
        images: The model's processor of images, if it reads any.

    Attributes:
        images: See the arguments.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ServerTemplate = MODELS_OWN,
        images: "ImageProcessor | None" = None,
    ) -> None:
        self.images = images
        if template.text is not None:
            tokenizer.chat_template = template.text
        self._tokenizer: Any = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        self.pieces = self._make_pieces()
        self.model = model_text(tokenizer, images=images is not None)
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
        images: Sequence[str] = (),
    ) -> list[int]:
        """Return the tokens of a request's text or chat.

        Args:
            request: A request whose prompt is a text or chat.
            max_tokens: Maximum tokens; None: unlimited.
            kept: Number of the last tokens to keep, whatever `max_tokens` says; None: all.
            allow_special_tokens: Whether a chat's texts may spell special tokens.
            images: The texts that stand for a chat's images.

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

        def render(change: Change) -> str:
            text = self._renderer.render(request.chat, change)
            return self._with_images(text, texts, images) if images else text

        text = render(keep)
        self._check_fits(text, max_tokens)
        if allow_special_tokens or not self._control.may_be_in(texts):
            return self.encode(text, add_special_tokens=adds)
        ids = self._control.encode(text, texts, render)
        return self._between_special_tokens(ids) if adds else ids

    def _with_images(self, text: str, texts: Sequence[str], images: Sequence[str]) -> str:
        """Return a rendered chat with the texts that stand for its images.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if it does not tell where they are.
        """
        assert self.images is not None
        placeholder = self.images.placeholder
        if any(placeholder in each for each in texts):
            why = f"texts beside images must not have {placeholder!r}, which stands for an image"
            raise rpc.invalid("chat.messages", f"chat.messages: {why}")
        first, *others = text.split(placeholder)
        if len(others) != len(images):
            raise rpc.invalid(
                "chat.messages",
                f"the model's chat template shows {len(others)} of the {len(images)} images of"
                " chat.messages",
            )
        pairs = zip(images, others, strict=True)
        return first + "".join(image + after for image, after in pairs)

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
        return [ids for ids, _ in encoded], second

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
    decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()  # as JSON
    ids = backend.get_vocab(with_added_tokens=True)
    spellings: list[str | None] = [None] * (1 + max(max(ids.values(), default=-1), *added, -1))
    for text, i in (*ids.items(), *((token.content, i) for i, token in added.items())):
        spellings[i] = text
    return Pieces(
        lambda token_ids: backend.decode(token_ids, skip_special_tokens=True),
        spellings,
        frozenset(i for i, token in added.items() if token.special),
        byte_fallback=b'"ByteFallback"' in decoder,
    )
