"""The baselines: iteration-level scheduling over contiguous reservations.

Orca as the paper rebuilt it (section 6.1), with three guesses at how long an
output will be; each reservation is one run of a buddy allocator's slots, made
when a request is admitted and kept until it is complete. First come, first
served; the one at the front waits until there is a run for it.
"""

import heapq
from collections import deque
from collections.abc import Callable

from benchmarks.memory_study import cost
from benchmarks.memory_study.buddy import BuddyAllocator
from benchmarks.memory_study.measure import MemoryUse, Recorder, RunResult
from benchmarks.memory_study.traces import Trace

Reservation = Callable[[int, int], int]
"""Slots to reserve for a prompt and an output of those lengths."""


def _pow2(prompt: int, output: int) -> int:
    return min(prompt + (1 << (output - 1).bit_length()), cost.MODEL_LENGTH)


RESERVATIONS: dict[str, Reservation] = {
    "Orca (Max)": lambda _prompt, _output: cost.MODEL_LENGTH,
    "Orca (Pow2)": _pow2,
    "Orca (Oracle)": lambda prompt, output: prompt + output,
}


class ContiguousSystem:
    """One run of a trace under one reservation rule."""

    def __init__(self, trace: Trace, reservation: Reservation, num_slots: int) -> None:
        self._trace = trace
        self._reservation = reservation
        self._buddy = BuddyAllocator(num_slots)
        self._waiting: deque[int] = deque()
        self._prefills: deque[int] = deque()
        self._computed: dict[int, int] = {}  # prompt tokens done, of those in _prefills
        self._ends: list[tuple[int, int]] = []  # heap of (step of the last token, request)
        self._start_of: dict[int, int] = {}
        self._held = 0  # slots with a token's K/V
        self._own = 0  # slots that requests will have filled at their ends
        self._promised = 0  # slots that the rule asked for
        self._step = 0

    def run(self, latency_bound: float | None = None) -> RunResult | None:
        """Serves the trace; None where its latency is bound to be over the bound."""
        trace = self._trace
        recorder = Recorder(len(trace), latency_bound)
        now, arrived = 0.0, 0
        while len(recorder.result.latencies) < len(trace):
            if not (self._waiting or self._start_of):
                now = max(now, float(trace.arrivals[arrived]))
            while arrived < len(trace) and trace.arrivals[arrived] <= now:
                self._waiting.append(arrived)
                arrived += 1
            self._step += 1
            tokens, context, drawn = self._compute()
            seconds = cost.step_seconds(tokens=tokens, context=context)
            now += seconds
            if recorder.step(now, bool(self._waiting)):
                recorder.result.memory.add(seconds, self._memory())
            for index in self._finish(drawn):
                recorder.complete(now - float(trace.arrivals[index]), int(trace.outputs[index]))
            if recorder.hopeless:
                return None
        recorder.result.seconds = now
        return recorder.result

    def _compute(self) -> tuple[int, int, list[int]]:
        """A step: its tokens, the slots it reads, the requests whose prompt is now computed."""
        decodes = len(self._ends)
        budget = cost.MAX_NUM_BATCHED_TOKENS - decodes
        self._held += decodes
        drawn = []
        while budget > 0 and (self._prefills or self._admit()):
            index = self._prefills[0]
            count = min(int(self._trace.prompts[index]) - self._computed[index], budget)
            self._computed[index] += count
            self._held += count
            budget -= count
            if self._computed[index] == self._trace.prompts[index]:
                self._prefills.popleft()
                del self._computed[index]
                drawn.append(index)
        return cost.MAX_NUM_BATCHED_TOKENS - budget, self._held, drawn

    def _admit(self) -> bool:
        """Reserves memory for the request at the front, if there is a run for it."""
        if not self._waiting or len(self._start_of) == cost.MAX_NUM_SEQS:
            return False
        index = self._waiting[0]
        prompt, output = self._lengths(index)
        start = self._buddy.allocate(self._reservation(prompt, output))
        if start is None:
            return False
        self._start_of[index] = start
        self._own += prompt + output
        self._promised += self._reservation(prompt, output)
        self._prefills.append(self._waiting.popleft())
        self._computed[index] = 0
        return True

    def _lengths(self, index: int) -> tuple[int, int]:
        return int(self._trace.prompts[index]), int(self._trace.outputs[index])

    def _finish(self, drawn: list[int]) -> list[int]:
        """Frees the requests that drew their last token in this step."""
        for index in drawn:
            heapq.heappush(self._ends, (self._step + int(self._trace.outputs[index]) - 1, index))
        ended = []
        while self._ends and self._ends[0][0] == self._step:
            _, index = heapq.heappop(self._ends)
            prompt, output = self._lengths(index)
            self._buddy.free(self._start_of.pop(index))
            self._held -= prompt + output - 1  # the last token is never fed back
            self._own -= prompt + output
            self._promised -= self._reservation(prompt, output)
            ended.append(index)
        return ended

    def _memory(self) -> MemoryUse:
        allocated = self._buddy.num_slots - self._buddy.num_free
        return MemoryUse(
            useful=self._held,
            reserved=self._own - self._held,
            internal=self._promised - self._own,
            rounding=allocated - self._promised,
            free=self._buddy.num_free,
            logical=allocated,
            requests=len(self._start_of),
        )
