"""Time work on a device with events and cold caches; return medians."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 3
FLUSH_BYTES = 256 << 20
"""Bytes written before each run: more than any GPU's L2 cache, and enough work for the host to
launch the run's kernels meanwhile."""


class Timer:
    """A timer of functions on one device."""

    def __init__(self, device: torch.device, *, runs: int) -> None:
        """Allocate what `runs` runs of each function need."""
        self.device = device
        self._runs = runs
        self._flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8)
        self._flush = self._flush.to(device)

    def time(self, work: Callable[[], object]) -> float:
        """Return the median seconds of `work` on the device.

        Kernels must take longer than their launch on the host; otherwise use `time_recorded`.
        """
        for _ in range(WARM_UPS):
            work()
        return self._median(work)

    def time_recorded(self, work: Callable[[], object], *, calls: int = 1) -> float:
        """Return the median seconds of a call on the device, replayed as a CUDA graph.

        The host's time to launch kernels does not count.

        Args:
            work: Launches kernels, always on the same tensors, without waiting.
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
        """Return the median seconds until all streams have finished `work`."""

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
