"""Measure an engine step's host time besides the model.

    python -m benchmarks.host_time [--sequences 1 16 64 256 1024] [--chunk 512] [--seconds 5]

The engine is the real one, over gRPC: scheduler, block manager, inputs, sampled tokens, sessions.
Only the model is fake and takes no time: each token is the previous one plus 1. So steps follow
each other as fast as the host allows. Each number of sequences is measured twice: decodes alone,
and decodes beside a chunk of a prompt in every step.

Parts are wall time of the core's thread, including waits for the interpreter. CPU time is split
into the core's thread and all others, which handle messages.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from benchmarks.fixture import CONTEXT, VOCABULARY, Node, engine, make_model
from benchmarks.processor_time import thread_times, timed
from benchmarks.report import table
from octavo.v1 import engine_pb2, engine_pb2_grpc

PROMPT = 32
"""Prompt tokens of decoding sequences."""
LONG_PROMPT = CONTEXT - 64
BLOCK_SIZE = 16
PARTS = {
    "schedule": "scheduling",
    "prepare": "batch to tensors",
    "launch": "launching, without the model",
    "advance": "counting tokens",
    "collect": "collecting tokens",
    "update": "taking tokens",
    "report": "making events",
    "publish": "publishing events",
    "other": "between the parts",
}
FIGURES = ("steps", "tokens", "thread", *(part for part in PARTS if part != "other"))
"""Counters of the engine's process, in the file's order."""
PLACES = {figure: place for place, figure in enumerate(FIGURES)}


@dataclass(frozen=True)
class Cost:
    """The cost of steps.

    Attributes:
        step: Wall time in seconds.
        parts: Seconds of the step by part.
        core: CPU seconds of the core's thread.
        others: CPU seconds of the process' other threads.
        tokens: Tokens per second that reached the client.
    """

    step: float
    parts: dict[str, float]
    core: float
    others: float
    tokens: float


# In the engine's process.


class Counts:
    """Counters in a file that both processes map.

    Args:
        path: The file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        mode = "r+" if path.exists() else "w+"
        # A plain view, because a memmap's methods take a microsecond each.
        self._values = np.memmap(path, np.float64, mode, shape=(len(FIGURES),)).view(np.ndarray)

    def add(self, figure: str, value: float) -> None:
        """Add to a counter."""
        self._values[PLACES[figure]] += value

    def put(self, figure: str, value: float) -> None:
        """Set a counter."""
        self._values[PLACES[figure]] = value

    def read(self) -> dict[str, float]:
        """Return all counters."""
        return dict(zip(FIGURES, self._values.tolist(), strict=True))


def without_model(path: Path) -> None:
    """Replace the model in this process' engine by a fake, and count the time of its parts.

    Args:
        path: The file of the counters.
    """
    from octavo.engine.core import EngineCore  # noqa: PLC0415 - only in the engine's process
    from octavo.engine.core import step as core_step  # noqa: PLC0415
    from octavo.engine.core.requests import Requests as CoreRequests  # noqa: PLC0415
    from octavo.engine.execution.executor import Executor  # noqa: PLC0415
    from octavo.engine.execution.pending_step import PendingStep  # noqa: PLC0415
    from octavo.engine.scheduling.scheduler import Scheduler  # noqa: PLC0415

    counts = Counts(path)

    def most_likely(_: Executor, inputs: Any, __: Any) -> list[int]:  # noqa: ANN401
        time.sleep(0)  # as a model does, it lets other threads have the interpreter
        rows = inputs.token_ids.numpy()[0, inputs.logit_rows.numpy()]
        following: list[int] = ((rows + 1) % (VOCABULARY - 1)).tolist()
        return following

    setattr(Executor, "_most_likely", most_likely)  # noqa: B010 - replaces a method
    for owner, name, part in (
        (Scheduler, "schedule", "schedule"),
        (Executor, "prepare", "prepare"),
        (Executor, "launch", "launch"),
        (Executor, "sample", "launch"),
        (core_step, "advance", "advance"),
        (PendingStep, "collect", "collect"),
        (core_step, "update", "update"),
        (CoreRequests, "report_starts", "report"),
        (CoreRequests, "report_outputs", "report"),
    ):
        setattr(owner, name, timed(getattr(owner, name), counts.add, part))
    step = EngineCore.step

    begun: list[EngineCore] = []

    def counted(core: EngineCore) -> Any:  # noqa: ANN401
        if not begun:  # its steps were given the function when they were made
            begun.append(core)
            publish = timed(core.steps._publish, counts.add, "publish")  # noqa: SLF001
            setattr(core.steps, "_publish", publish)  # noqa: B010
        output = step(core)
        counts.put("thread", threading.get_native_id())
        counts.add("steps", 1)
        counts.add("tokens", len(output.token_ids) if output else 0)
        return output

    setattr(EngineCore, "step", counted)  # noqa: B010


# In the benchmark's process.


class Requests:
    """Requests to an engine; another request replaces each one that ends.

    Args:
        sequences: Number of decoding sequences.
        chunk: Whether prompts are computed beside them, one after another.

    Attributes:
        tokens: Tokens received.
        decoding: Number of decoding requests.
    """

    def __init__(self, sequences: int, *, chunk: bool) -> None:
        self.tokens = 0
        self.decoding: set[str] = set()
        self._sequences = sequences
        self._chunk = chunk
        self._names = count()
        self._numbers = count(1)
        self._draw = np.random.default_rng(0)
        self._submits: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()

    async def run(self, address: str) -> None:
        """Keep the engine busy until cancelled."""
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[no-untyped-call]
            for _ in range(self._sequences):
                self._submit("decode", PROMPT, CONTEXT - PROMPT)
            if self._chunk:
                for _ in range(2):  # so that one waits when the other ends
                    self._submit("prefill", LONG_PROMPT, 1)
            async for response in stub.Session(self._messages()):
                self._take(response)

    async def _messages(self) -> AsyncIterator[engine_pb2.SessionRequest]:
        while True:
            yield await self._submits.get()

    def _submit(self, kind: str, prompt: int, output: int) -> None:
        submit = engine_pb2.Submit(
            request_id=f"{kind} {next(self._names)}",
            prompt_token_ids=self._draw.integers(0, VOCABULARY - 1, prompt).tolist(),
        )
        submit.sampling.temperature = 0
        submit.first_number = next(self._numbers)
        submit.stop.max_tokens = output
        submit.stop.ignore_eos = True
        self._submits.put_nowait(engine_pb2.SessionRequest(submit=submit))

    def _take(self, response: engine_pb2.SessionResponse) -> None:
        if response.failures:
            raise RuntimeError(f"a request failed: {response.failures[0].message}")
        self.tokens += len(response.tokens.token_ids)
        for started in response.started:
            if started.request_id.startswith("decode"):
                self.decoding.add(started.request_id)
        for output in response.outputs:
            self.tokens += len(output.token_ids)
            if not output.finish_reason:
                continue
            self.decoding.discard(output.request_id)
            if output.request_id.startswith("decode"):
                self._submit("decode", PROMPT, CONTEXT - PROMPT)
            else:
                self._submit("prefill", LONG_PROMPT, 1)


@asynccontextmanager
async def _engine(model: str, counters: Path, sequences: int, chunk: int) -> AsyncIterator[Node]:
    node = engine(
        model,
        sabotage=partial(without_model, counters),
        max_num_seqs=sequences + 2,
        max_num_batched_tokens=sequences + max(chunk, PROMPT),
        num_blocks=(sequences + 4) * (CONTEXT // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
    )
    try:
        yield await node.start()
    finally:
        await node.close()


async def measure(sequences: int, chunk: int, seconds: float) -> Cost:
    """Measure one number of sequences.

    Args:
        sequences: Number of decoding sequences.
        chunk: Prompt tokens in each step beside them; 0 for none.
        seconds: Duration of the measurement.
    """
    with tempfile.TemporaryDirectory() as directory:
        counters = Path(directory) / "counters"
        counts = Counts(counters)
        async with _engine(make_model(Path(directory)), counters, sequences, chunk) as node:
            pid = node.pid
            assert pid is not None
            requests = Requests(sequences, chunk=chunk > 0)
            task = asyncio.create_task(requests.run(node.address))
            while len(requests.decoding) < sequences and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            before, tokens, cpu = counts.read(), requests.tokens, thread_times(pid)
            began = time.perf_counter()
            await asyncio.wait([task], timeout=seconds)
            took = time.perf_counter() - began
            after, tokens, ended = (
                counts.read(),
                requests.tokens - tokens,
                thread_times(pid),
            )
            if task.done():
                task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    spent = {figure: after[figure] - before[figure] for figure in FIGURES}
    steps = max(spent["steps"], 1)
    parts = {part: spent[part] / steps for part in PARTS if part != "other"}
    parts["other"] = took / steps - sum(parts.values())
    used = {thread: ran - cpu.get(thread, (0.0, 0.0))[0] for thread, (ran, _) in ended.items()}
    core = used.pop(int(after["thread"]), 0.0)
    return Cost(took / steps, parts, core / steps, sum(used.values()) / steps, tokens / took)


def _table(costs: dict[int, Cost]) -> str:
    def row(name: str, values: list[float]) -> list[str]:
        return [name, *(f"{value * 1e3:.2f}" for value in values)]

    measured = costs.values()
    rows = [row(name, [cost.parts[part] for cost in measured]) for part, name in PARTS.items()]
    rows += [
        row("a step", [cost.step for cost in measured]),
        row("CPU time of the core's thread", [cost.core for cost in measured]),
        row("CPU time of the other threads", [cost.others for cost in measured]),
        ["tokens/s", *(f"{cost.tokens:,.0f}" for cost in measured)],
    ]
    return table(["milliseconds a step", *(f"{sequences:,}" for sequences in costs)], rows)


def _growth(costs: dict[int, Cost]) -> str:
    """Return a sentence about the cost of each further sequence."""
    fewest, most = min(costs), max(costs)
    if fewest == most:
        return ""
    a, b = costs[fewest], costs[most]
    more = 1e6 / (most - fewest)
    core, whole = (b.core - a.core) * more, (b.core + b.others - a.core - a.others) * more
    return (
        f"A further sequence costs {(b.step - a.step) * more:.1f} us of a step: {core:.1f} us of"
        f" CPU time in the core's thread, {whole:.1f} us in the whole process."
    )


def main() -> None:
    """Measure each number of sequences and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of prompts; 0: none")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, chunk in (("decode only", 0), ("with a chunk of a prompt", options.chunk)):
        if title != "decode only" and not chunk:
            continue
        costs = {}
        for sequences in options.sequences:
            costs[sequences] = asyncio.run(measure(sequences, chunk, options.seconds))
            print(f"{title}, {sequences}: {costs[sequences].step * 1e3:.2f} ms", file=sys.stderr)
        print(f"\nSteps: {title}\n\n{_table(costs)}\n\n{_growth(costs)}", flush=True)


if __name__ == "__main__":
    main()
