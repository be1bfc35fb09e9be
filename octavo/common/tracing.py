"""OpenTelemetry spans of requests, exported to a collector if an endpoint is set.

There are no spans per token. Spans never contain text of prompts or outputs. Attributes follow the
OpenTelemetry conventions for generative AI.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo.common.version import own_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as Provider

EXPORT_SECONDS = 3.0
"""Timeout of an export to the collector, also at exit."""
CONTEXT_FIELDS = ("traceparent", "tracestate")
"""Fields of W3C Trace Context."""

_propagator = TraceContextTextMapPropagator()


class TracingError(OSError):
    """The OpenTelemetry SDK is missing; the message says what to install."""


class Tracing:
    """The tracer and exporter of one process.

    The caller decides whether its trace is sampled; OTEL_TRACES_SAMPLER decides for new traces.

    Attributes:
        tracer: Creates spans; does nothing without an endpoint.
        on: Whether an endpoint is set.

    Raises:
        TracingError: The SDK is not installed.
    """

    def __init__(self, endpoint: str | None, service: str) -> None:
        self.on = endpoint is not None
        self.tracer: Tracer = NoOpTracer()
        self._provider: Provider | None = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - in an extra
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise TracingError(
                "--otlp-endpoint needs OpenTelemetry's SDK: pip install 'octavo[tracing]'"
            ) from error
        resource = {"service.name": service, "service.version": own_version()}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("octavo", own_version())

    async def close(self) -> None:
        """Export the remaining spans, within the timeout."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)


def extract(carrier: Mapping[str, str]) -> Context:
    """Parse the trace context of `traceparent` and `tracestate`; empty if invalid."""
    return _propagator.extract(carrier, Context())


def inject(context: Context) -> dict[str, str]:
    """Return the W3C Trace Context fields of the span in `context`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier


def epoch_clock() -> Callable[[float], int]:
    """Return a function that converts monotonic seconds to Unix nanoseconds."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda moment: int(moment * 1e9) + offset
