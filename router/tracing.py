"""Spans of a request: the whole request, its time in the queue, and each attempt at an engine."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from octavo.common.tracing import CONTEXT_FIELDS, Tracing, epoch_clock, extract, inject
from octavo.router.gen_ai_metrics import PROVIDER, operation_name
from octavo.router.requests.embedding import EmbeddingRequest, EmbeddingState
from octavo.router.requests.errors import EngineLostError
from octavo.router.requests.request import Request
from octavo.router.requests.state import RequestState
from octavo.v1.sampling_pb2 import FinishReason

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

SERVICE = "octavo.v1.GenerationService"
AT_FAULT = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
"""Status codes of server errors; others are the client's errors."""
MAX_INTEGER = 2**63 - 1
"""Maximum of an integer attribute."""


class RequestSpan:
    """The spans of one request.

    Args:
        tracing: The router's tracer.
        metadata: The call's metadata, which may hold the parent's trace context.
        arrival: Monotonic time of the request's arrival, in seconds.
        method: Name of the RPC.
    """

    def __init__(
        self,
        tracing: Tracing,
        metadata: Iterable[tuple[str, str | bytes]],
        arrival: float,
        method: str,
    ) -> None:
        self._tracer = tracing.tracer
        self._on = tracing.on
        carrier: dict[str, str] = {}
        if self._on:
            for key, value in metadata:
                if key in CONTEXT_FIELDS and isinstance(value, str):
                    carrier.setdefault(key, value)
        self._span = self._tracer.start_span(
            method,
            extract(carrier),
            kind=SpanKind.SERVER,
            start_time=epoch_clock()(arrival) if self._on else None,
            attributes={"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method},
        )
        self._context = set_span_in_context(self._span)

    def describe(self, request: Request | EmbeddingRequest) -> None:
        """Add the attributes of a valid request."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                "gen_ai.operation.name": operation_name(request.message),
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": request.model,
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.model": request.model,
            }
        )
        if isinstance(request, EmbeddingRequest):
            return
        sampling = request.message.sampling
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.stream": not request.whole,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.choice.count": request.num_outputs,
        }
        for name in ("temperature", "top_p"):
            if sampling.HasField(name):
                attributes[f"gen_ai.request.{name}"] = getattr(sampling, name)
        for name in ("top_k", "frequency_penalty", "presence_penalty"):
            if value := getattr(sampling, name):
                attributes[f"gen_ai.request.{name}"] = float(value)
        if sampling.HasField("seed"):
            # A seed has 64 unsigned bits; an integer attribute has 64 signed bits.
            fits = sampling.seed <= MAX_INTEGER
            attributes["gen_ai.request.seed"] = sampling.seed if fits else str(sampling.seed)
        self._span.set_attributes(attributes)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Record a span of the wait for an engine."""
        span = self._tracer.start_span("queue", self._context)
        try:
            yield
        finally:
            span.end()

    @contextmanager
    def attempt(self, engine: str) -> Iterator[dict[str, str]]:
        """Record a span of an attempt at an engine; yield its trace context."""
        span = self._tracer.start_span(
            "engine", self._context, kind=SpanKind.CLIENT, attributes=_server(engine)
        )
        try:
            yield inject(set_span_in_context(span)) if self._on else {}
        except EngineLostError as error:
            span.set_status(Status(StatusCode.ERROR, error.message))
            self._span.add_event("engine lost", _server(engine))
            raise
        finally:
            span.end()

    def end(
        self,
        state: RequestState | EmbeddingState | None,
        code: grpc.StatusCode,
        message: str | None,
    ) -> None:
        """End the request's span with its status; `state` is None for an invalid request."""
        if self._span.is_recording():
            self._span.set_attribute("rpc.grpc.status_code", code.value[0])
            if state is not None:
                outputs = state.outputs if isinstance(state, RequestState) else ()
                reasons = [
                    FinishReason.Name(output.reason).removeprefix("FINISH_REASON_").lower()
                    for output in outputs
                    if output.ended
                ]
                self._span.set_attributes(
                    {
                        "gen_ai.response.finish_reasons": reasons,
                        "gen_ai.usage.input_tokens": len(state.request.prompt),
                        "gen_ai.usage.output_tokens": state.output_tokens,
                        "gen_ai.usage.cache_read.input_tokens": state.cached_tokens,
                        "octavo.migrations": state.migrations,
                    }
                )
            if code is not grpc.StatusCode.OK:
                self._span.set_attribute("error.type", code.name)
            if code in AT_FAULT:
                self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()


def _server(address: str) -> dict[str, str | int]:
    """Return the attributes of a server's address: host and port, or a socket path."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return {"server.address": address}
    return {"server.address": host.strip("[]"), "server.port": int(port)}
