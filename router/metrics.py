"""The router's Prometheus metrics."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from octavo.common.version import own_version

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)


class TokenHistogram(Histogram):
    """A histogram with binary search for the bucket, as every token is observed.

    `Histogram` searches its buckets linearly.
    """

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Observe an amount; exemplars are not supported.

        Raises:
            ValueError: An exemplar was given.
        """
        if exemplar is not None:
            raise ValueError("TokenHistogram does not support exemplars")
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """One model's metrics, looked up once instead of once per token."""

    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter
    ttft: Histogram
    tpot: Histogram
    itl: Histogram
    queue_time: Histogram
    duration: Histogram


class RouterMetrics:
    """The router's metrics.

    Args:
        registry: Registry for the metrics.
        in_flight: Returns the number of requests in progress.
        queued: Returns the number of requests that wait for an engine.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        in_flight: Callable[[], int],
        queued: Callable[[], int],
    ) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_router_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(
                f"octavo_router_{name}_seconds", text, ["model"], registry=registry, buckets=buckets
            )

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"octavo_router_{name}", text, labels, registry=registry)

        info = Info("octavo_router", "The router's version.", registry=registry)
        info.info({"version": own_version()})
        self.requests = counter(
            "requests",
            "Calls of Generate, Embed, Score and Classify that ended, by gRPC status.",
            "model",
            "code",
        )
        self.tenant_requests = counter(
            "tenant_requests",
            "Calls of Generate, Embed, Score and Classify of each tenant, by gRPC status.",
            "tenant",
            "code",
        )
        self.tenant_tokens = counter(
            "tenant_tokens",
            "Prompt and output tokens of each tenant.",
            "tenant",
            "kind",
        )
        self.migrations = counter("migrations", "Migrations of requests between engines.", "model")
        self.handovers = counter(
            "handovers", "Requests that went on at another engine after a prefill engine.", "model"
        )
        self.engines_up = gauge("engines_up", "Engines connected.", "model")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of admitted prompts.", "model")
        self._cached_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens found in engines' prefix caches.", "model"
        )
        self._output_tokens = counter("output_tokens", "Tokens received from engines.", "model")
        self._ttft = histogram("ttft", "Time to first token, from the request's arrival.")
        self._tpot = histogram(
            "tpot", "Mean time per output token after the first, of each output.", TOKEN_SECONDS
        )
        self._itl = TokenHistogram(
            "octavo_router_itl_seconds",
            "Time between two tokens of an output (inter-token latency).",
            ["model"],
            registry=registry,
            buckets=TOKEN_SECONDS,
        )
        self._queue_time = histogram("queue_time", "Time that requests waited for an engine.")
        self._duration = histogram("request_duration", "Time from a request's arrival to its end.")
        gauge(
            "requests_in_flight", "Calls of Generate, Embed, Score and Classify in progress."
        ).set_function(in_flight)
        gauge("requests_queued", "Requests waiting for an engine.").set_function(queued)
        self._models: dict[str, ModelMetrics] = {}

    @property
    def total_output_tokens(self) -> int:
        """Tokens received from engines, for all models."""
        return int(
            sum(
                sample.value
                for metric in self._output_tokens.collect()
                for sample in metric.samples
                if sample.name.endswith("_total")
            )
        )

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of one model."""
        if model not in self._models:
            self.handovers.labels(model)
            self.migrations.labels(model)  # start at 0: else rate() misses the first
            self._models[model] = ModelMetrics(
                prompt_tokens=self._prompt_tokens.labels(model),
                cached_tokens=self._cached_tokens.labels(model),
                output_tokens=self._output_tokens.labels(model),
                ttft=self._ttft.labels(model),
                tpot=self._tpot.labels(model),
                itl=self._itl.labels(model),
                queue_time=self._queue_time.labels(model),
                duration=self._duration.labels(model),
            )
        return self._models[model]
