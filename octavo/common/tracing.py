"""Spans of requests, by OpenTelemetry, sent to a collector where one is named.

Where none is, the tracer is the API's own that does nothing. A request costs a
few calls when it arrives, migrates and ends; a token costs nothing in either case.
No text of prompts or outputs is ever in a span. Attributes are named by the
conventions for generative AI, where these have a name.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as Provider

EXPORT_SECONDS = 3.0
"""What the collector has to take a batch of spans, the last ones at the end included."""
CONTEXT_FIELDS = ("traceparent", "tracestate")
"""What carries a trace from process to process, as W3C Trace Context has it."""

_propagator = TraceContextTextMapPropagator()


class TracingError(OSError):
    """Spans cannot be made; the message says what to install."""


class Tracing:
    """One process' tracer, and the way to its collector.

    A trace that a caller began is followed, or not, as the caller says; one that
    begins here as OTEL_TRACES_SAMPLER says, by default always.

    Attributes:
        tracer: makes spans; none at all where there is no endpoint.
        on: whether there is one.

    Args:
        endpoint: the collector's URL, or None.
        service: this process' name in traces.

    Raises:
        TracingError: the SDK is not installed.
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
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise TracingError(
                "--otlp-endpoint needs OpenTelemetry's SDK: pip install 'octavo[tracing]'"
            ) from error
        resource = {"service.name": service, "service.version": version("octavo")}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("octavo", version("octavo"))

    async def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        if self._provider is not None:
            await asyncio.to_thread(self._provider.shutdown)


def extract(carrier: Mapping[str, str]) -> Context:
    """Returns the trace that `traceparent` and `tracestate` name; none if they are not valid."""
    return _propagator.extract(carrier, Context())


def inject(context: Context) -> dict[str, str]:
    """Returns what `extract` reads, for the span in `context`."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier


def epoch_clock() -> Callable[[float], int]:
    """Returns what turns times of the monotonic clock into spans' nanoseconds since 1970.

    It goes by how far the two clocks are apart now, the same for all that it is given.
    """
    apart = time.time_ns() - time.monotonic_ns()
    return lambda moment: int(moment * 1e9) + apart
