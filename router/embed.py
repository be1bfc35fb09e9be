"""Serves requests for embeddings, from gRPC and HTTP clients alike."""

import time
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
    check_embed_request,
    check_text_length,
    prompt_of,
)
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import generation_pb2


class Embedder:
    """Embeds tenants' texts on the engines of a pool.

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
            request, dimensions = await self._prepare(message, call)
            state = call.state = EmbeddingState(request)
            call.usage.reserve(len(request.prompt))
            call.span.describe(request)
            await self._attempts.run(state, partial(_embed, state), call.span)
            assert state.embeddings is not None, "it is done"
            call.usage.prompt(len(request.prompt))
            self._calls.metrics.of(call.model).prompt_tokens.inc(len(request.prompt))
            return generation_pb2.EmbedResponse(
                request_id=request.request_id,
                model=request.model,
                embeddings=state.embeddings,
                dimensions=dimensions,
                token_counts=request.lengths,
            )

    async def _prepare(
        self, message: generation_pb2.EmbedRequest, call: Call
    ) -> tuple[EmbeddingRequest, int]:
        """Validate and tokenize; return the request and the dimensions of its embeddings."""
        model, tenant = call.model, call.usage.tenant
        info, limits = self._pool.embedding(model), self._pool.limits(model)
        if info is None:
            raise rpc.invalid("model", f"model {model!r} generates text and does not embed it")
        check_embed_request(message, limits, info)
        if message.texts:
            prompt = prompt_of(message, info)
            token_ids = await self._tokenizers.encode_texts(
                self._pool.tokenizer(model),
                [prompt + text for text in message.texts],
                tenant,
                limits.max_model_len,
                truncate=message.truncate,
            )
        else:
            most = limits.max_model_len if message.truncate else None
            token_ids = [list(tokens.token_ids[:most]) for tokens in message.tokens]
        field = "texts" if message.texts else "tokens"
        lengths = [len(each) for each in token_ids]
        for number, length in enumerate(lengths):
            check_text_length(f"{field}[{number}]", length, limits)
        request = EmbeddingRequest(
            request_id=call.request_id,
            model=model,
            tenant=tenant,
            message=message,
            prompt=list(chain.from_iterable(token_ids)),
            lengths=lengths,
            arrival=call.arrival,
            deadline=call.deadline,
        )
        return request, message.dimensions or info.dimensions


async def _embed(state: EmbeddingState, claim: Claim[Engine], *_: object) -> None:
    """Have an engine embed a request's texts."""
    deadline = state.request.deadline
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    await claim.engine.embed(state, left)
