"""The engine's Prometheus metrics."""

import time
from collections.abc import Callable, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from octavo.engine.parallel.times import Times
from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import MetricsNames
from octavo.v1.engine_pb2 import Load

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COMPILE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MASK_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)
_QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class EngineMetrics:
    """An engine's metrics, in their own registry.

    Attributes:
        registry: The registry.
        exported: The registry that is served, which has them if `names` says so.
    """

    def __init__(self, names: MetricsNames = "octavo") -> None:
        self.registry = CollectorRegistry()
        self.exported = CollectorRegistry() if names == "vllm" else self.registry
        self._seen: dict[str, int] = {}  # by the names of `_counted`
        self._seen_eager_steps = 0

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_engine_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"octavo_engine_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"octavo_engine_{name}", text, buckets=buckets, registry=self.registry)

        text = "Instance id, version, model, device, dtype, kernels, threads, CPUs and NUMA nodes."
        self.info = Info("octavo_engine", text, registry=self.registry)
        self.requests = counter("requests", "Requests by how they ended.", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens of admitted requests found in the prefix cache."
        )
        self.output_tokens = counter("output_tokens", "Tokens drawn.")
        self.drafted_tokens = counter("drafted_tokens", "Tokens drafted for outputs.")
        self.accepted_tokens = counter("accepted_tokens", "Drafted tokens that were right.")
        self.preemptions = counter("preemptions", "Sequence groups preempted, by mode.", "mode")
        swap_space_full = counter(
            "swap_space_full", "Preemptions that recompute because swap space was full."
        )
        offloaded_blocks = counter(
            "offloaded_blocks", "Prefix blocks copied to CPU swap space when evicted."
        )
        restored_blocks = counter(
            "restored_blocks", "Prefix blocks copied back from CPU swap space, not recomputed."
        )
        spilled_blocks = counter("spilled_blocks", "Blocks of long sequences moved to --kv-spill.")
        disk_blocks = counter(
            "disk_blocks", "Prefix blocks of --kv-disk: read, written, dropped.", "what"
        )
        late_disk_reads = counter(
            "late_disk_reads", "Reads of --kv-disk that took longer than computing the prefix."
        )
        peer_blocks = counter(
            "peer_blocks", "Prefix blocks copied from or to other engines: read, sent.", "what"
        )
        late_peer_reads = counter(
            "late_peer_reads", "Copies from other engines that took longer than computing."
        )
        self.queue_seconds = histogram(
            "queue_seconds", "Time from arrival to first admission.", _QUEUE_SECONDS
        )
        self.step_seconds = histogram("step_seconds", "Duration of a step.", _STEP_SECONDS)
        self.batch_tokens = histogram(
            "batch_tokens", "Tokens computed in a step.", tuple(map(float, _BATCH_TOKENS))
        )
        constraints = counter(
            "constraints", "Constraints by what came of them: compiled, refused, cached.", "outcome"
        )
        self._counted: dict[str, tuple[Counter, *tuple[str, ...]]] = {
            "preemptions_swap": (self.preemptions, "swap"),
            "preemptions_recompute": (self.preemptions, "recompute"),
            "swap_space_full": (swap_space_full,),
            "drafted_tokens": (self.drafted_tokens,),
            "accepted_tokens": (self.accepted_tokens,),
            "offloaded_blocks": (offloaded_blocks,),
            "restored_blocks": (restored_blocks,),
            "spilled_blocks": (spilled_blocks,),
            **{outcome: (constraints, outcome) for outcome in ("compiled", "refused", "cached")},
            **{what: (disk_blocks, what) for what in ("read", "written", "dropped")},
            "late": (late_disk_reads,),
            **{f"peer_{what}": (peer_blocks, what) for what in ("read", "sent")},
            "peer_late": (late_peer_reads,),
        }
        labelled = "preemptions_swap", "preemptions_recompute", "compiled", "refused", "cached"
        self.observe_counters(dict.fromkeys(labelled, 0))  # so that they are 0, not absent
        self.constraint_seconds = histogram(
            "constraint_seconds", "Time to compile a constraint, or refuse it.", _COMPILE_SECONDS
        )
        self.mask_seconds = histogram(
            "mask_seconds", "Time that a step waits for masks of constraints.", _MASK_SECONDS
        )
        self.late_masks = counter(
            "late_masks", "Masks that were not ready for the next step, which went on without."
        )
        self.ranks = gauge("ranks", "Processes that each hold a part of the model; 1 holds all.")
        self.rank_seconds = gauge(
            "rank_seconds",
            "Seconds since the start that rank 0 spent on other ranks: broadcast, reduce, gather,"
            " receive, send.",
            "what",
        )
        self.sessions = gauge("sessions", "Routers connected.")
        self.batch_sequences = gauge("batch_sequences", "Sequences in the last step.")
        self.groups = gauge("groups", "Sequence groups by state.", "state")
        self.compiled = gauge(
            "compiled", "1 if the last step ran traced or compiled, 0 if it ran in Python."
        )
        self.eager_steps = counter(
            "eager_steps",
            "Steps on a GPU that ran in Python as they do not fit the compiled model.",
        )
        self.blocks = gauge("blocks", "KV-cache blocks on the device by state.", "state")
        self.kv_cache_usage = gauge(
            "kv_cache_usage_ratio",
            "Share of the device's KV-cache blocks in block tables, 0 to 1; cached ones are not.",
        )
        self.shared_blocks = gauge(
            "shared_blocks", "Blocks on the device that several block-table entries hold."
        )
        self.wasted_slots = gauge(
            "wasted_slots", "Places for a token, in used device blocks, that no token has."
        )
        self.swap_blocks = gauge("swap_blocks", "Blocks of CPU swap space by state.", "state")
        self.disk_blocks_held = gauge(
            "disk_blocks_held", "Prefix blocks in --kv-disk, other engines' included."
        )
        self.disk_read_ratio = gauge(
            "disk_read_ratio",
            "Time to read a prefix from --kv-disk, as a share of computing it; 1 at most.",
        )

    @property
    def prefix_hit_rate(self) -> float:
        """The share of admitted prompt tokens that were in the prefix cache, 0 to 1."""
        value = self.registry.get_sample_value
        prompt, cached = (value(f"octavo_engine_{n}_tokens_total") for n in ("prompt", "cached"))
        return cached / prompt if cached and prompt else 0.0

    def observe_step(
        self, batch: Batch, seconds: float, *, compiled: bool, eager_steps: int = 0
    ) -> None:
        """Count a step.

        Args:
            batch: The batch that it computed.
            seconds: The duration of the step.
            compiled: Whether the model is compiled.
            eager_steps: Number of steps since the start that ran uncompiled.
        """
        eager = eager_steps - self._seen_eager_steps
        self._seen_eager_steps = eager_steps
        self.eager_steps.inc(eager)
        self.compiled.set(compiled and not eager)
        self.step_seconds.observe(seconds)
        self.batch_tokens.observe(batch.num_tokens)
        self.batch_sequences.set(batch.num_sequences)

    def observe_texts(self, tokens: int, texts: int, seconds: float) -> None:
        """Count a step that embedded texts."""
        self.prompt_tokens.inc(tokens)
        self.step_seconds.observe(seconds)
        self.batch_tokens.observe(tokens)
        self.batch_sequences.set(texts)

    def show_rank_times(self, times: Callable[[], Times]) -> None:
        """Make the gauge of times read rank 0's times when scraped."""

        def reader(name: str) -> Callable[[], float]:
            return lambda: float(getattr(times(), name))

        for each in fields(Times):
            self.rank_seconds.labels(each.name).set_function(reader(each.name))

    def observe_start(self, request: Request, cached_tokens: int) -> None:
        """Count a request that is computed for the first time."""
        self.queue_seconds.observe(time.monotonic() - request.arrival)
        self.prompt_tokens.inc(len(request.prompt))
        self.cached_tokens.inc(cached_tokens)

    def show(self, load: Callable[[], Load]) -> None:
        """Make the gauges of groups and blocks read the core's load when scraped.

        Setting them all after every step would add 0.1 ms to it.
        """

        def show(gauge: Gauge, read: Callable[[Load], float]) -> None:
            gauge.set_function(lambda: read(load()))

        show(self.groups.labels("running"), lambda load: load.running)
        show(self.groups.labels("waiting"), lambda load: load.waiting)
        show(self.groups.labels("swapped"), lambda load: load.swapped)
        show(self.blocks.labels("used"), used_blocks)
        show(self.blocks.labels("cached"), lambda load: load.cached_blocks)
        show(self.blocks.labels("free"), lambda load: load.free_blocks)
        show(self.kv_cache_usage, usage_ratio)
        show(self.shared_blocks, lambda load: load.shared_blocks)
        show(self.wasted_slots, lambda load: load.wasted_slots)
        show(self.disk_blocks_held, lambda load: load.disk_blocks)
        show(self.disk_read_ratio, lambda load: load.disk_read_share)
        show(self.swap_blocks.labels("used"), lambda load: load.used_swap_blocks)
        show(self.swap_blocks.labels("cached"), lambda load: load.cached_swap_blocks)
        show(
            self.swap_blocks.labels("free"),
            lambda load: load.total_swap_blocks - load.used_swap_blocks - load.cached_swap_blocks,
        )

    def observe_counters(self, counters: Mapping[str, int]) -> None:
        """Add what a part of the engine has counted since the last call."""
        for name, value in counters.items():
            if value != (seen := self._seen.get(name)) and name in self._counted:
                metric, *labels = self._counted[name]
                (metric.labels(*labels) if labels else metric).inc(value - (seen or 0))
                self._seen[name] = value


def used_blocks(load: Load) -> int:
    """Return the number of device blocks that sequences hold."""
    return load.total_blocks - load.free_blocks - load.cached_blocks


def usage_ratio(load: Load) -> float:
    """Return the share of the device blocks that sequences hold, 0 to 1."""
    return used_blocks(load) / load.total_blocks if load.total_blocks else 0.0
