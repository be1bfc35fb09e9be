"""The spans of a request on an engine, created at its end."""

import time

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from octavo.common.tracing import epoch_clock, extract
from octavo.engine.scheduling.sequence import GroupEvent, SequenceGroup

PHASES = {GroupEvent.PREFILL: "prefill", GroupEvent.DECODE: "decode"}
SEARCH = "search"
"""A beam search's only phase after the queue."""
FAULTS = ("internal", "unavailable", "deadline_exceeded")


class RequestTracer:
    """Creates spans from the history of an ended group.

    The request's span has a child for each phase: queue, prefill, decode. Preemptions and
    swaps are events of the request's span.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def ended(self, group: SequenceGroup, outcome: str) -> None:
        """Create the spans of a group that has just ended."""
        request, now, epoch_ns = group.request, time.monotonic(), epoch_clock()
        span = self._tracer.start_span(
            "request",
            extract(request.trace_context),
            kind=SpanKind.SERVER,
            start_time=epoch_ns(request.arrival),
            attributes={
                "gen_ai.provider.name": "octavo",
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.choice.count": request.num_outputs,
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.usage.input_tokens": len(request.prompt),
                "gen_ai.usage.output_tokens": sum(s.num_output for s in group.sequences),
                "gen_ai.usage.cache_read.input_tokens": group.cached_tokens,
                "octavo.outcome": outcome,
            },
        )
        context = set_span_in_context(span)
        phase, since = "queue", request.arrival
        for event, at in group.history:
            if event in PHASES:
                self._tracer.start_span(phase, context, start_time=epoch_ns(since)).end(
                    epoch_ns(at)
                )
                phase, since = SEARCH if group.beam else PHASES[event], at
            else:
                span.add_event(event.value, timestamp=epoch_ns(at))
        self._tracer.start_span(phase, context, start_time=epoch_ns(since)).end(epoch_ns(now))
        if outcome in FAULTS:
            span.set_attribute("error.type", outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(epoch_ns(now))
