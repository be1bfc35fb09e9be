"""Serves requests for embeddings, scores and classes, from gRPC and HTTP clients alike."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

from octavo.common import rpc
from octavo.router.admission import Claim
from octavo.router.attempts import Attempts
from octavo.router.call_tracker import Call, CallTracker, Metadata
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.requests.embedding import (
    EmbeddingRequest,
    EmbeddingState,
    Message,
    check_classify_request,
    check_embed_request,
    check_score_request,
    check_text_length,
    prompt_of,
)
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.router.text.tokenizer import EncodedTexts, Texts
from octavo.v1 import engine_pb2, generation_pb2


class Embedder:
    """Embeds, scores and classifies tenants' texts on the engines of a pool.

    Args:
        pool: The engines.
        tokenizers: Run the pool's tokenizers.
        calls: Counts, logs and traces the calls.
        attempts: Runs requests on engines.
    """

    def __init__(
        self, pool: EnginePool, tokenizers: Tokenizers, calls: CallTracker, attempts: Attempts
    ) -> None:
        self._pool = pool
        self._tokenizers = tokenizers
        self._calls = calls
        self._attempts = attempts

    async def embed(
        self,
        message: generation_pb2.EmbedRequest,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> generation_pb2.EmbedResponse:
        """Validate and tokenize texts, admit them and return their embeddings.

        Args:
            message: The client's request.
            tenant: The authenticated caller.
            timeout: Seconds until the client's deadline; None: no deadline.
            metadata: The call's metadata, which may hold a trace context.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        async with self._calls.request(message, "Embed", tenant, timeout, metadata) as call:
            info, limits = self._pool.embedding(call.model), self._pool.limits(call.model)
            if info is None:
                raise self._pool.other_purpose(call.model)
            check_embed_request(message, limits, info)
            prompt = prompt_of(message, info)
            texts = [prompt + text for text in message.texts]
            encoded = await self._encode(message, call, texts)
            request = self._request(message, call, encoded, "texts" if texts else "tokens")
            return generation_pb2.EmbedResponse(
                request_id=request.request_id,
                model=request.model,
                embeddings=await self._run(request, call),
                dimensions=message.dimensions or info.dimensions,
                token_counts=request.lengths,
            )

    async def score(
        self,
        message: generation_pb2.ScoreRequest,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> generation_pb2.ScoreResponse:
        """Return the scores of documents; arguments and errors are as `embed`'s."""
        async with self._calls.request(message, "Score", tenant, timeout, metadata) as call:
            info = self._classifier(call.model)
            check_score_request(message, len(info.labels))
            queries: Sequence[str] = message.queries
            if len(queries) == 1:
                queries = [queries[0]] * len(message.documents)
            pairs = list(zip(queries, message.documents, strict=True))
            encoded = await self._encode_classes(message, call, info, pairs)
            request = self._request(message, call, encoded, "documents")
            return generation_pb2.ScoreResponse(
                request_id=request.request_id,
                model=request.model,
                scores=await self._run(request, call),
                token_counts=request.lengths,
            )

    async def classify(
        self,
        message: generation_pb2.ClassifyRequest,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> generation_pb2.ClassifyResponse:
        """Return the scores of texts' classes; arguments and errors are as `embed`'s."""
        async with self._calls.request(message, "Classify", tenant, timeout, metadata) as call:
            info = self._classifier(call.model)
            check_classify_request(message, self._pool.limits(call.model))
            texts: Texts = message.texts
            if message.second_texts:
                texts = list(zip(message.texts, message.second_texts, strict=True))
            encoded = await self._encode_classes(message, call, info, texts)
            request = self._request(message, call, encoded, "texts" if texts else "tokens")
            return generation_pb2.ClassifyResponse(
                request_id=request.request_id,
                model=request.model,
                labels=info.labels,
                scores=await self._run(request, call),
                token_counts=request.lengths,
            )

    def _classifier(self, model: str) -> engine_pb2.ClassifierInfo:
        """Return how a model classifies.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if it does not.
        """
        info = self._pool.classifier(model)
        if info is None:
            raise self._pool.other_purpose(model)
        return info

    async def _encode_classes(
        self,
        message: generation_pb2.ScoreRequest | generation_pb2.ClassifyRequest,
        call: Call,
        info: engine_pb2.ClassifierInfo,
        texts: Texts,
    ) -> EncodedTexts:
        """Return the tokens of texts or pairs for a classifier.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT if it takes pairs only, or cannot cut them.
        """
        if not (texts and info.HasField("pair_chat")):
            return await self._encode(message, call, _prompted(texts, info))
        pairs = [pair for pair in texts if not isinstance(pair, str)]
        if message.truncate or len(pairs) < len(texts):
            field, why = ("truncate", "cannot cut") if message.truncate else ("texts", "takes only")
            raise rpc.invalid(field, f"model {call.model!r} {why} pairs, which are parts of chats")
        return await self._tokenizers.encode_pairs(
            self._pool.tokenizer(call.model),
            pairs,
            call.usage.tenant,
            system=info.prompt,
            opens=info.pair_chat.add_generation_prompt,
        )

    async def _encode(self, message: Message, call: Call, texts: Texts) -> EncodedTexts:
        """Return the tokens of texts or pairs; without any, those that the message has itself."""
        most = self._pool.limits(call.model).max_model_len
        if not texts:
            assert not isinstance(message, generation_pb2.ScoreRequest), "it has documents"
            end = most if message.truncate else None
            return [list(each.token_ids[:end]) for each in message.tokens], []
        tokenizer, tenant = self._pool.tokenizer(call.model), call.usage.tenant
        return await self._tokenizers.encode_texts(
            tokenizer, texts, tenant, most, truncate=message.truncate
        )

    def _request(
        self, message: Message, call: Call, encoded: EncodedTexts, field: str
    ) -> EmbeddingRequest:
        """Return a request of texts, which are in this field, after a check of their lengths."""
        token_ids, second_lengths = encoded
        limits, lengths = self._pool.limits(call.model), [len(each) for each in token_ids]
        for number, length in enumerate(lengths):
            check_text_length(f"{field}[{number}]", length, limits)
        return EmbeddingRequest(
            request_id=call.request_id,
            model=call.model,
            tenant=call.usage.tenant,
            message=message,
            prompt=list(chain.from_iterable(token_ids)),
            lengths=lengths,
            second_lengths=second_lengths,
            arrival=call.arrival,
            deadline=call.deadline,
        )

    async def _run(self, request: EmbeddingRequest, call: Call) -> bytes:
        """Return the results of a request, as engines send them."""
        state = call.state = EmbeddingState(request)
        call.usage.reserve(len(request.prompt))
        call.span.describe(request)
        await self._attempts.run(state, partial(_embed, state), call.span)
        assert state.embeddings is not None, "it is done"
        call.usage.prompt(len(request.prompt))
        self._calls.metrics.of(call.model).prompt_tokens.inc(len(request.prompt))
        return state.embeddings


def _prompted(texts: Texts, info: engine_pb2.ClassifierInfo) -> Texts:
    """Return texts with a classifier's prompt before each, and before the first of each pair."""
    if not info.prompt:
        return texts
    prompt = info.prompt
    pairs = [(prompt + pair[0], pair[1]) for pair in texts if not isinstance(pair, str)]
    return pairs or [prompt + text for text in texts if isinstance(text, str)]


async def _embed(state: EmbeddingState, claim: Claim[Engine], *_: object) -> None:
    """Have an engine embed a request's texts."""
    deadline = state.request.deadline
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    await claim.engine.embed(state, left)
