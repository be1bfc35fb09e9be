"""Request metrics that follow OpenTelemetry's semantic conventions for generative AI.

In Prometheus, dots in names become underscores and the unit is appended:
`gen_ai.server.request.duration` is `gen_ai_server_request_duration_seconds`. Bucket boundaries
follow the conventions too. Each request is observed once, at its end.
"""

import grpc
from prometheus_client import CollectorRegistry, Histogram

from octavo.router.requests.embedding import EmbeddingState, Message
from octavo.router.requests.state import RequestState
from octavo.v1 import generation_pb2

PROVIDER = "octavo"
"""Value of `gen_ai.provider.name` in metrics and spans."""

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_DURATION_SECONDS = tuple(0.01 * 2**i for i in range(14))
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_OUTPUT_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_TOKENS = tuple(float(4**i) for i in range(14))


OPERATIONS = {
    generation_pb2.EmbedRequest: "embeddings",
    generation_pb2.ScoreRequest: "score",
    generation_pb2.ClassifyRequest: "classify",
}
"""Operations of requests that generate no text. The conventions name embeddings only."""


def operation_name(message: generation_pb2.GenerateRequest | Message) -> str:
    """Return a request's `gen_ai.operation.name`."""
    if not isinstance(message, generation_pb2.GenerateRequest):
        return OPERATIONS[type(message)]
    return "chat" if message.HasField("chat") else "text_completion"


class GenAiMetrics:
    """The conventions' metrics of a model server and its token usage.

    Only the duration includes failed requests; otherwise refused requests would look fast.

    Args:
        registry: Registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"gen_ai_{name}", text, (*_LABELS, *labels), registry=registry, buckets=buckets
            )

        self._duration = histogram(
            "server_request_duration_seconds",
            "Time from a request's arrival to its end; error_type is its gRPC status unless OK.",
            _DURATION_SECONDS,
            "error_type",
        )
        self._first_token = histogram(
            "server_time_to_first_token_seconds",
            "Time to first token, of requests that ended with OK.",
            _FIRST_TOKEN_SECONDS,
        )
        self._output_token = histogram(
            "server_time_per_output_token_seconds",
            "Time per output token after the first, of requests that ended with OK.",
            _OUTPUT_TOKEN_SECONDS,
        )
        self._tokens = histogram(
            "client_token_usage",
            "Tokens of each request that ended with OK; gen_ai_token_type is input or output.",
            _TOKENS,
            "gen_ai_token_type",
        )

    def ended(
        self,
        model: str,
        message: generation_pb2.GenerateRequest | Message,
        code: grpc.StatusCode,
        seconds: float,
        state: RequestState | EmbeddingState | None,
    ) -> None:
        """Observe a request at its end.

        Args:
            model: Resolved model name.
            message: The client's request.
            code: The request's status.
            seconds: Duration since the request's arrival.
            state: The request's outputs; None if it was refused before it had any.
        """
        labels = (operation_name(message), PROVIDER, model)
        ok = code is grpc.StatusCode.OK
        self._duration.labels(*labels, "" if ok else code.name).observe(seconds)
        if not ok or state is None:
            return
        self._tokens.labels(*labels, "input").observe(len(state.request.prompt))
        if isinstance(state, EmbeddingState):
            return
        if state.ttft is not None:
            self._first_token.labels(*labels).observe(state.ttft)
        for output in state.outputs:
            if output.seconds_per_token is not None:
                self._output_token.labels(*labels).observe(output.seconds_per_token)
        self._tokens.labels(*labels, "output").observe(state.output_tokens)
