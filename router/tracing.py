"""The spans of one Generate call: the call itself, its waiting, and each engine that it had."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from octavo.common.tracing import CONTEXT_FIELDS, Tracing, epoch_clock, extract, inject
from octavo.router.engines.session import EngineLostError
from octavo.router.requests.request import Request
from octavo.v1 import generation_pb2
from octavo.v1.sampling_pb2 import FinishReason

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

SERVICE, METHOD = "octavo.v1.GenerationService", "Generate"
AT_FAULT = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
"""Codes that are a server's errors; others are its client's."""


class CallTrace:
    """What is traced of one call.

    Args:
        tracing: The router's.
        context: The call's, whose metadata may name a trace to be part of.
        arrival: When it came, by the monotonic clock.
    """

    def __init__(
        self, tracing: Tracing, context: "grpc.aio.ServicerContext[Any, Any]", arrival: float
    ) -> None:
        self._tracer = tracing.tracer
        self._on = tracing.on
        carrier: dict[str, str] = {}
        if self._on:
            for key, value in context.invocation_metadata() or ():
                if key in CONTEXT_FIELDS and isinstance(value, str):
                    carrier.setdefault(key, value)
        self._span = self._tracer.start_span(
            METHOD,
            extract(carrier),
            kind=SpanKind.SERVER,
            start_time=epoch_clock()(arrival) if self._on else None,
            attributes={"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": METHOD},
        )
        self._context = set_span_in_context(self._span)

    def asked(self, request: Request, message: generation_pb2.GenerateRequest) -> None:
        """Notes what is asked for, once that is known to be valid."""
        if not self._span.is_recording():
            return
        sampling = message.sampling
        kind = "chat" if message.HasField("chat") else "text_completion"
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": kind,
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.choice.count": len(request.outputs),
            "gen_ai.response.id": request.request_id,
        }
        for name in ("temperature", "top_p", "seed"):
            if sampling.HasField(name):
                # Seeds have 64 bits, and attributes a sign.
                value = getattr(sampling, name)
                attributes[f"gen_ai.request.{name}"] = str(value) if name == "seed" else value
        for name in ("top_k", "frequency_penalty", "presence_penalty"):
            if value := getattr(sampling, name):
                attributes[f"gen_ai.request.{name}"] = value
        self._span.set_attributes(attributes)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Spans the wait for an engine."""
        span = self._tracer.start_span("queue", self._context)
        try:
            yield
        finally:
            span.end()

    @contextmanager
    def attempt(self, engine: str) -> Iterator[dict[str, str]]:
        """Spans an engine's work; gives what the engine is to be told of the trace."""
        span = self._tracer.start_span(
            "engine", self._context, kind=SpanKind.CLIENT, attributes={"server.address": engine}
        )
        try:
            yield inject(set_span_in_context(span)) if self._on else {}
        except EngineLostError as error:
            span.set_status(Status(StatusCode.ERROR, error.message))
            self._span.add_event("engine lost", {"server.address": engine})
            raise
        finally:
            span.end()

    def end(self, request: Request | None, code: grpc.StatusCode, message: str | None) -> None:
        """Ends the call's span, with what came of it."""
        if self._span.is_recording():
            self._span.set_attribute("rpc.grpc.status_code", code.value[0])
            if request is not None:
                reasons = [
                    FinishReason.Name(output.reason).removeprefix("FINISH_REASON_").lower()
                    for output in request.outputs
                    if output.ended
                ]
                self._span.set_attributes(
                    {
                        "gen_ai.response.finish_reasons": reasons,
                        "gen_ai.usage.input_tokens": len(request.prompt),
                        "gen_ai.usage.output_tokens": request.output_tokens,
                        "octavo.usage.cached_tokens": request.cached_tokens,
                        "octavo.moves": request.moves,
                    }
                )
            if code in AT_FAULT:
                self._span.set_attribute("error.type", code.name)
                self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()
