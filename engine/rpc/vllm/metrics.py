"""The engine's metrics under vLLM's names, for endpoint pickers and dashboards."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.common.limits import Limits
from octavo.engine.lora.adapter import Adapter
from octavo.engine.metrics import EngineMetrics, usage_ratio
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.sequence import GroupEvent, GroupState, SequenceGroup
from octavo.v1.engine_pb2 import Load

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


class VllmMetrics(Collector):
    """Converts `EngineMetrics` to vLLM's metrics when they are scraped.

    Its own counters change once per request, at the request's end.

    Args:
        metrics: The engine's metrics.
        model: The model's name in requests.
        limits: The limits of requests.
        load: Returns the load.
        groups: Returns the requests that have not ended.
        adapters: The adapters that are loaded.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        *,
        model: str,
        limits: Limits,
        load: Callable[[], Load],
        groups: Callable[[], Iterable[SequenceGroup]],
        adapters: Iterable[Adapter],
    ) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model, "engine": "0"}
        (self._budget,) = limits.budgets
        self._load = load
        self._groups = groups
        self._adapters = adapters
        registry = CollectorRegistry()  # in none that is served

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._success = Counter(
            "success", "Requests that ended, by why.", ["finished_reason"], registry=registry
        )
        self._first_token = histogram(
            "first_token", "Time from arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._per_token = histogram(
            "per_token", "Mean time per token after the first, by output.", _TOKEN_SECONDS
        )
        self._latency = histogram(
            "latency", "Time from arrival to the last token.", _REQUEST_SECONDS
        )

    def ended(self, group: SequenceGroup) -> None:
        """Count a request that has ended, in the core's thread."""
        now, arrival = time.monotonic(), group.request.arrival
        first = next((at for event, at in group.history if event is GroupEvent.DECODE), None)
        for sequence in group.sequences:
            if sequence.finish_reason in _REASONS:
                self._success.labels(_REASONS[sequence.finish_reason]).inc()
            if first is not None and sequence.num_output > 1:
                self._per_token.observe((now - first) / (sequence.num_output - 1))
        if first is not None:
            self._first_token.observe(first - arrival)
            self._latency.observe(now - arrival)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the thread that serves them."""
        load, ours = self._load(), self._metrics
        running, waiting = load.running, load.waiting + load.swapped
        yield self._gauge("num_requests_running", "Requests in the running batch.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of KV-cache blocks in use, 0 to 1.",
            usage_ratio(load),
        )
        yield self._gauge(
            "cache_config_info",
            "The KV cache.",
            1,
            block_size=str(self._budget.block_size),
            num_gpu_blocks=str(load.total_blocks),
        )
        yield self._lora_info()
        for source, name in (
            (ours.prompt_tokens, "prompt_tokens"),
            (ours.output_tokens, "generation_tokens"),
            (ours.prompt_tokens, "prefix_cache_queries"),
            (ours.cached_tokens, "prefix_cache_hits"),
            (self._success, "request_success"),
            (ours.queue_seconds, "request_queue_time_seconds"),
            (ours.batch_tokens, "iteration_tokens_total"),
            (self._first_token, "time_to_first_token_seconds"),
            (self._per_token, "request_time_per_output_token_seconds"),
            (self._latency, "e2e_request_latency_seconds"),
        ):
            yield self._renamed(source, name)
        yield self._preemptions()

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        metric = Metric(f"vllm:{name}", text, "gauge")
        metric.add_sample(metric.name, self._labels | labels, value)
        return metric

    def _lora_info(self) -> Metric:
        """Return the adapters of requests; the value is the time, as in vLLM."""
        groups = list(self._groups())
        running = [group for group in groups if group.state is GroupState.RUNNING]
        waiting = [group for group in groups if group.state is not GroupState.RUNNING]
        return self._gauge(
            "lora_requests_info",
            "LoRA adapters of running and waiting requests.",
            time.time(),
            max_lora=str(sum(1 for _ in self._adapters)),
            running_lora_adapters=_names(running),
            waiting_lora_adapters=_names(waiting),
        )

    def _renamed(self, source: Counter | Gauge | Histogram, name: str) -> Metric:
        """Return a metric by another name, with vLLM's labels."""
        (found,) = source.collect()
        metric = Metric(f"vllm:{name}", found.documentation, found.type)
        for sample in found.samples:
            suffix = sample.name.removeprefix(found.name)
            metric.add_sample(metric.name + suffix, self._labels | sample.labels, sample.value)
        return metric

    def _preemptions(self) -> Metric:
        """Return the preemptions of both modes."""
        (found,) = self._metrics.preemptions.collect()
        metric = Metric("vllm:num_preemptions", found.documentation, "counter")
        total = sum(s.value for s in found.samples if s.name.endswith("_total"))
        metric.add_sample(f"{metric.name}_total", self._labels, total)
        return metric


def _names(groups: Iterable[SequenceGroup]) -> str:
    """Return the names of requests' adapters, each once."""
    adapters = (group.request.adapter for group in groups)
    return ",".join(sorted({adapter.name for adapter in adapters if adapter is not None}))
