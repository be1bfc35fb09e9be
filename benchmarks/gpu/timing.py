"""Time work on a device: by events around it, with cold caches, as medians."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 3
FLUSH_BYTES = 256 << 20
"""Written before each run: more than any GPU's L2 cache, and long enough to write for the
host to have given the run's kernels to the GPU before it begins."""


class Timer:
    """A timer of functions on one device."""

    def __init__(self, device: torch.device, *, runs: int) -> None:
        """Allocate what `runs` runs of each function need."""
        self.device = device
        self._runs = runs
        self._flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8)
        self._flush = self._flush.to(device)

    def time(self, work: Callable[[], object]) -> float:
        """Return the median of seconds that `work` takes the device.

        Kernels must be longer than the host takes to launch them; else see `time_recorded`.
        """
        for _ in range(WARM_UPS):
            work()
        return self._median(work)

    def time_recorded(self, work: Callable[[], object], *, calls: int = 1) -> float:
        """Return the median of seconds that a call takes the device, replayed as a CUDA graph.

        The host's time to launch kernels does not count.

        Args:
            work: Launches kernels, always on the same tensors, and waits for none.
            calls: Number of calls that `work` makes, such as layers.
        """
        for _ in range(WARM_UPS):
            work()
        if self.device.type != "cuda":
            return self._median(work) / calls
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        return self._median(graph.replay) / calls

    def _median(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            return statistics.median(_host_seconds(work) for _ in range(self._runs))
        spans = []
        for _ in range(self._runs):
            self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in spans)

    def time_whole(self, work: Callable[[], object]) -> float:
        """Return the median of seconds until all that `work` gave to any stream is done."""

        def whole() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        for _ in range(WARM_UPS):
            whole()
        return statistics.median(_host_seconds(whole) for _ in range(self._runs))


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
