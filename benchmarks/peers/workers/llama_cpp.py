"""llama.cpp through llama-cpp-python's low-level API, batched as in its server.

The package's own `Llama` answers one request at a time, so this file has a loop that batches
several sequences.
"""

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp as native
import numpy as np

from .protocol import Outcome, Request, Runner, Setup, serve

SLOTS = (8, 16, 48)
SEQUENCE_TOKENS = 1_280
"""Tokens per slot of the cache."""
BATCH_TOKENS = 2_048
"""llama.cpp's own default."""


@dataclass(slots=True)
class Slot:
    """A running request, and the tokens that the model has not seen yet."""

    number: int
    request: Request
    pending: list[int]
    seen: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCpp:
    """A model with one context of many sequences.

    The first run of many requests tries each of `SLOTS` and returns the best outcome; later runs
    use the best one.
    """

    def __init__(self, setup: Setup) -> None:
        native.llama_backend_init()
        model = native.llama_model_load_from_file(
            setup.model.encode(), native.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {setup.model}")
        params = native.llama_context_default_params()
        params.n_seq_max = max(SLOTS)
        params.n_ctx = max(SLOTS) * SEQUENCE_TOKENS
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = setup.threads
        params.kv_unified = False  # no prefix is shared
        context = native.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._context = context
        self._memory = native.llama_get_memory(context)
        self._vocabulary = native.llama_vocab_n_tokens(native.llama_model_get_vocab(model))
        self._batch = native.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._slots: int | None = None

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Run requests with the fastest number of slots."""
        longest = max(len(request.prompt) + request.output_tokens for request in requests)
        if longest > SEQUENCE_TOKENS:
            raise ValueError(f"a request has {longest} tokens; a slot holds {SEQUENCE_TOKENS}")
        if len(requests) == 1:
            return self._run(requests, 1)
        if self._slots is not None:
            return self._run(requests, self._slots)
        counts = {min(slots, len(requests)) for slots in SLOTS}
        tried = {slots: self._run(requests, slots) for slots in counts}
        self._slots = min(tried, key=lambda slots: tried[slots].seconds)
        return tried[self._slots]

    def _run(self, requests: Sequence[Request], slots: int) -> Outcome:
        outputs: list[list[int]] = [[] for _ in requests]
        first: dict[int, float] = {}
        waiting = deque(enumerate(requests))
        running: dict[int, Slot] = {}
        began = time.perf_counter()
        while waiting or running:
            for sequence in range(slots):
                if waiting and sequence not in running:
                    number, request = waiting.popleft()
                    running[sequence] = Slot(number, request, request.prompt)
            for sequence, slot in self._step(running):
                first.setdefault(slot.number, time.perf_counter() - began)
                if len(slot.output) == slot.request.output_tokens:
                    outputs[slot.number] = slot.output
                    native.llama_memory_seq_rm(self._memory, sequence, -1, -1)
                    del running[sequence]
        seconds = time.perf_counter() - began
        ranked = [first[number] for number in range(len(requests))]
        return Outcome(seconds, outputs, ranked, f"{slots} slots")

    def _step(self, running: dict[int, Slot]) -> list[tuple[int, Slot]]:
        """Compute one batch, decodes first; return the slots that have a new token."""
        batch, row = self._batch, 0
        ended: list[tuple[int, int, Slot]] = []
        for sequence, slot in sorted(running.items(), key=lambda item: len(item[1].pending)):
            taken = slot.pending[: BATCH_TOKENS - row]
            slot.pending = slot.pending[len(taken) :]
            for token in taken:
                batch.token[row] = token
                batch.pos[row] = slot.seen
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = 0
                slot.seen += 1
                row += 1
            if taken and not slot.pending:
                batch.logits[row - 1] = 1
                ended.append((row - 1, sequence, slot))
        batch.n_tokens = row
        if status := native.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        for last, _, slot in ended:
            token = self._best(last)
            slot.output.append(token)
            slot.pending = [token]
        return [(sequence, slot) for _, sequence, slot in ended]

    def _best(self, row: int) -> int:
        """Return the most likely token after a row of the batch."""
        logits = ctypes.cast(
            native.llama_get_logits_ith(self._context, row), ctypes.POINTER(ctypes.c_float)
        )
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def load(setup: Setup) -> Runner:
    """Load a GGUF file."""
    return LlamaCpp(setup)


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
