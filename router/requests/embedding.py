"""A request for embeddings or scores: what was asked, what came of it, and its validation."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from octavo.common import rpc
from octavo.common.limits import MAX_TEXTS, Limits, check_count, check_number, check_token_ids
from octavo.common.priority import effective_arrival
from octavo.common.sampling_parameters import MAX_PRIORITY
from octavo.router.tenants.tenant import Tenant
from octavo.v1 import engine_pb2, generation_pb2

Message = generation_pb2.EmbedRequest | generation_pb2.ScoreRequest | generation_pb2.ClassifyRequest
"""A client's message."""
Call = grpc.aio.UnaryUnaryCall[
    engine_pb2.EngineServiceEmbedRequest, engine_pb2.EngineServiceEmbedResponse
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EmbeddingRequest:
    """A valid, tokenized request, immutable. Admission treats it as a prompt without output.

    Attributes:
        request_id: Id in responses, logs and traces.
        model: Resolved model name.
        tenant: The caller.
        message: The client's message.
        prompt: The tokens of all texts, one text after the other.
        lengths: Number of tokens of each text or pair.
        second_lengths: Number of these that are a pair's second text; empty without pairs.
        arrival: Monotonic time of arrival, in seconds.
        deadline: Monotonic time of the client's deadline; None: no deadline.
    """

    request_id: str
    model: str
    tenant: Tenant
    message: Message
    prompt: Sequence[int]
    lengths: Sequence[int]
    second_lengths: Sequence[int]
    arrival: float
    deadline: float | None = None
    min_tokens = 0
    max_tokens = 1

    @property
    def priority(self) -> int:
        """Priority; higher is served earlier."""
        return self.message.priority

    @property
    def effective_arrival(self) -> float:
        """Sort key in queues, lowest first: arrival time minus the priority's credit."""
        return effective_arrival(self.arrival, self.priority)

    def keys(self, _: int) -> list[int]:
        """Return no keys: nothing is cached."""
        return []

    def submit(self) -> engine_pb2.EngineServiceEmbedRequest:
        """Return the message to an engine."""
        submit = engine_pb2.EngineServiceEmbedRequest(
            token_ids=self.prompt,
            lengths=self.lengths,
            second_lengths=self.second_lengths,
            request_id=self.request_id,
        )
        if not isinstance(self.message, generation_pb2.EmbedRequest):
            submit.raw = self.message.raw
        elif self.message.HasField("dimensions"):
            submit.dimensions = self.message.dimensions
        return submit


class EmbeddingState:
    """A request's attempts on engines, and its embeddings or scores.

    Args:
        request: The request.

    Attributes:
        request: The request.
        embeddings: The embeddings or scores, as engines send them; None before the end.
        engine: Address of the last engine; empty before the first.
        queue_time: Seconds from arrival to the first engine; None before it.
        migrations: Number of migrations to another engine.
        failed_on: Engine on which a step failed, if any.
    """

    sequences = 1
    cached_tokens = output_tokens = 0
    handed_over = False
    last_time = 0.0
    first_time = ttft = None
    outputs: Sequence[object] = ()
    lengths: Sequence[int] = ()

    def __init__(self, request: EmbeddingRequest) -> None:
        self.request = request
        self.embeddings: bytes | None = None
        self.engine = ""
        self.queue_time: float | None = None
        self.migrations = 0
        self.failed_on: object | None = None
        self._call: Call | None = None
        self._error: rpc.RpcError | None = None

    @property
    def done(self) -> bool:
        """Whether the embeddings or scores are there."""
        return self.embeddings is not None

    async def take(self, engine: str, call: Call) -> None:
        """Wait for an engine's answer.

        Raises:
            rpc.RpcError: `fail` was called.
            grpc.aio.AioRpcError: The engine failed.
            asyncio.CancelledError: This task, or the call, was cancelled.
        """
        self.engine, self._call = engine, call
        try:
            self.embeddings = (await call).embeddings
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            call.cancel()
            self._call = None

    def fail(self, error: rpc.RpcError) -> None:
        """End the request."""
        self._error = error
        if self._call is not None:
            self._call.cancel()


def check_embed_request(
    request: generation_pb2.EmbedRequest, limits: Limits, info: engine_pb2.EmbeddingInfo
) -> None:
    """Check everything but the id and the number of each text's tokens.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the field's name.
    """
    _check_texts_or_tokens(request, limits)
    if request.HasField("prompt_name"):
        _check_prompt_name(request, info)
    if request.HasField("dimensions"):
        _check_dimensions(request.dimensions, info)


def check_classify_request(request: generation_pb2.ClassifyRequest, limits: Limits) -> None:
    """Check everything but the id and the number of each text's tokens.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the field's name.
    """
    _check_texts_or_tokens(request, limits)
    if request.second_texts:
        _check_texts("second_texts", request.second_texts)
        if len(request.second_texts) != len(request.texts):
            raise rpc.invalid(
                "second_texts",
                f"second_texts must be as many as texts, {len(request.texts)}, or none; got"
                f" {len(request.second_texts)}",
            )


def check_score_request(request: generation_pb2.ScoreRequest, labels: int) -> None:
    """Check everything but the id and the number of each pair's tokens.

    Args:
        request: The request.
        labels: Number of the model's classes.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the field's name.
    """
    if labels != 1:
        raise rpc.invalid(
            "model", f"Score needs a model with one class, and this one has {labels}: use Classify"
        )
    if not request.documents:
        raise rpc.invalid("documents", "documents must have at least one entry")
    _check_texts("documents", request.documents)
    if len(request.queries) not in {1, len(request.documents)}:
        raise rpc.invalid(
            "queries",
            f"queries must be one, or as many as documents, {len(request.documents)}; got"
            f" {len(request.queries)}",
        )
    _check_texts("queries", request.queries)
    check_number("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)


def _check_texts_or_tokens(
    request: generation_pb2.EmbedRequest | generation_pb2.ClassifyRequest, limits: Limits
) -> None:
    """Check texts, tokens and priority."""
    if bool(request.texts) == bool(request.tokens):
        raise rpc.invalid("texts", "texts or tokens must have at least one entry, and not both")
    _check_texts("texts", request.texts)
    check_count("tokens", len(request.tokens), MAX_TEXTS)
    check_number("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for number, tokens in enumerate(request.tokens):
        if not tokens.token_ids:
            raise rpc.invalid(f"tokens[{number}]", f"tokens[{number}] must have at least one token")
        check_token_ids(f"tokens[{number}].token_ids", tokens.token_ids, limits.vocab_size)


def _check_texts(field: str, texts: Sequence[str]) -> None:
    """Check the number of texts, and that none is empty."""
    check_count(field, len(texts), MAX_TEXTS)
    for number, text in enumerate(texts):
        if not text:
            raise rpc.invalid(
                f"{field}[{number}]", f"{field}[{number}] must have at least one character"
            )


def prompt_of(request: generation_pb2.EmbedRequest, info: engine_pb2.EmbeddingInfo) -> str:
    """Return the prompt that is put before a valid request's texts; empty if there is none."""
    given = request.HasField("prompt_name")
    name = request.prompt_name if given else info.default_prompt_name
    prompts: Mapping[str, str] = info.prompts
    return prompts[name] if name else ""


def check_text_length(field: str, tokens: int, limits: Limits) -> None:
    """Raise INVALID_ARGUMENT for a text without tokens, or with too many."""
    if not 1 <= tokens <= limits.max_model_len:
        raise rpc.invalid(
            field,
            f"{field} must have 1 to {limits.max_model_len} tokens; it has {tokens}: shorten it, or"
            " set truncate",
            reason=rpc.CONTEXT_LENGTH_EXCEEDED,
        )


def _check_prompt_name(
    request: generation_pb2.EmbedRequest, info: engine_pb2.EmbeddingInfo
) -> None:
    name = request.prompt_name
    if request.tokens and name:
        raise rpc.invalid("prompt_name", "prompt_name is for texts: tokens are complete")
    if name and name not in info.prompts:
        there = ", ".join(sorted(info.prompts)) or "none"
        raise rpc.invalid(
            "prompt_name", f"prompt_name must be one of the model's; got {name[:64]!r}, of: {there}"
        )


def _check_dimensions(dimensions: int, info: engine_pb2.EmbeddingInfo) -> None:
    if dimensions == info.dimensions or dimensions in info.fewer_dimensions:
        return
    if info.any_dimensions and 1 <= dimensions <= info.dimensions:
        return
    allowed = f"in [1, {info.dimensions}]"
    if not info.any_dimensions:
        numbers = sorted({*info.fewer_dimensions, info.dimensions})
        allowed = f"{' or '.join(map(str, numbers))}, which the model was trained for"
    raise rpc.invalid("dimensions", f"dimensions must be {allowed}; got {dimensions}")
