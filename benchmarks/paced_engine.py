"""An engine without a model: real gRPC and sessions, but steps of a fixed duration.

Its speed does not depend on the machine, so a benchmark knows its capacity and measures the router
in front of it. Each step gives every running sequence one token. Up to `max_num_seqs` sequences
run, first come, first served; requests end with LENGTH or at their deadline.
"""

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fixture import CONTEXT, EOS, VOCABULARY, Node
from octavo.common import logging
from octavo.common.rpc import create_server
from octavo.engine.events import FailureCode, OutputEvent, StepOutput
from octavo.engine.rpc.session import Session
from octavo.engine.scheduling.request import FinishReason
from octavo.v1 import engine_pb2, engine_pb2_grpc
from octavo.v1.engine_pb2 import Failure, Load, Started

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
LETTERS = range(64, 90)
"""Tokens of the byte tokenizer, one letter each."""
HEARTBEAT_SECONDS = 1.0
BLOCKS = 1 << 20


@dataclass(slots=True)
class Running:
    """A request that waits or runs."""

    session: int
    submit: engine_pb2.Submit
    sequences: int
    deadline: float | None
    drawn: int = 0


class PacedCore:
    """Replaces the engine's core."""

    def __init__(self, step_seconds: float, max_num_seqs: int) -> None:
        self._step_seconds = step_seconds
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self.sessions: dict[int, Session] = {}

    @property
    def load(self) -> Load:
        """The load, with always enough blocks."""
        running, waiting = len(self._running), len(self._waiting)
        return Load(
            running=running,
            waiting=waiting,
            total_blocks=BLOCKS,
            free_blocks=BLOCKS,
            step_seconds=self._step_seconds,
        )

    def open_session(self, session: int) -> None:
        """Send the load to a new session."""
        self.sessions[session].add(StepOutput(), self.load)

    def close_session(self, session: int) -> None:
        """Drop all requests of a session."""
        self._running = [r for r in self._running if r.session != session]
        self._waiting = deque(r for r in self._waiting if r.session != session)

    def submit(self, request: Running) -> None:
        """Queue a request from `_to_request`."""
        self._waiting.append(request)

    def abort(self, session: int, request_id: str, index: int | None = None) -> None:  # noqa: ARG002
        """Drop a request."""
        for queue in (self._running, self._waiting):
            for running in queue:
                if (running.session, running.submit.request_id) == (session, request_id):
                    queue.remove(running)
                    return

    async def run(self) -> None:
        """Run steps at their times; send a heartbeat while there is nothing to do."""
        due = spoke = time.monotonic()
        while True:
            due = max(due + self._step_seconds, time.monotonic() - self._step_seconds)
            await asyncio.sleep(due - time.monotonic())
            if self._running or self._waiting or time.monotonic() > spoke + HEARTBEAT_SECONDS:
                spoke = time.monotonic()
                self._step()

    def _step(self) -> None:
        outputs = {number: StepOutput() for number in self.sessions}
        self._admit(outputs)
        running, self._running = self._running, []
        for request in running:
            output, name = outputs[request.session], request.submit.request_id
            if request.deadline is not None and time.monotonic() > request.deadline:
                code = FailureCode.DEADLINE_EXCEEDED
                message = "the deadline passed"
                output.failures.append(Failure(request_id=name, code=code, message=message))
                continue
            request.drawn += 1
            last = request.drawn == request.submit.stop.max_tokens
            token = LETTERS[request.drawn % len(LETTERS)]
            first = request.submit.first_number
            if last or not first:
                reason = FinishReason.LENGTH if last else None
                output.outputs.extend(
                    OutputEvent(name, i, [token], None, [], reason, number=first and first + i)
                    for i in range(request.sequences)
                )
            else:  # tokens without details, as most of an engine's
                output.numbers.extend(range(first, first + request.sequences))
                output.token_ids.extend([token] * request.sequences)
            if not last:
                self._running.append(request)
        load = self.load
        for number, session in self.sessions.items():
            session.add(outputs[number], load)

    def _admit(self, outputs: dict[int, StepOutput]) -> None:
        places = self._max_num_seqs - sum(r.sequences for r in self._running)
        while self._waiting and self._waiting[0].sequences <= places:
            request = self._waiting.popleft()
            places -= request.sequences
            self._running.append(request)
            started = Started(request_id=request.submit.request_id)
            outputs[request.session].started.append(started)


class PacedServicer(engine_pb2_grpc.EngineServiceServicer):
    """EngineService over a paced core."""

    def __init__(self, tokenizer: str, core: PacedCore, max_num_seqs: int) -> None:
        self._core = core
        self._ids = count()
        self._info = engine_pb2.GetEngineInfoResponse(
            model="tiny",
            tokenizer=tokenizer,
            vocab_size=VOCABULARY,
            max_model_len=CONTEXT,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1 << 20,
            max_outputs=64,
            block_size=16,
            eos_token_ids=[EOS],
            load=core.load,
        )

    async def GetEngineInfo(self, request: Any, context: Any) -> Any:  # noqa: ANN401, ARG002, N802
        """Return the engine's description."""
        return self._info

    async def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: ANN401, ARG002, N802
        """Serve a router's requests."""
        number = next(self._ids)
        session = Session(self._core, _to_request)  # type: ignore[arg-type]
        self._core.sessions[number] = session
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            del self._core.sessions[number]


def _to_request(submit: engine_pb2.Submit, session: int, images: Any) -> Any:  # noqa: ANN401, ARG001
    sequences = submit.sampling.n if submit.sampling.HasField("n") else 1
    deadline = None
    if submit.HasField("timeout"):
        deadline = time.monotonic() + submit.timeout.ToTimedelta().total_seconds()
    return Running(session, submit, sequences, deadline)


def paced_engine(tokenizer: str, *, step_seconds: float, max_num_seqs: int) -> Node:
    """Return a paced engine as a process.

    Args:
        tokenizer: Directory with the byte tokenizer.
        step_seconds: Duration of a step.
        max_num_seqs: Maximum running sequences.
    """
    return Node(partial(_run, tokenizer, step_seconds, max_num_seqs))


def _run(tokenizer: str, step: float, places: int, port: int, ready: Connection) -> None:
    logging.configure("console", "error")
    core = PacedCore(step, places)
    asyncio.run(_serve(core, PacedServicer(tokenizer, core, places), port, ready))


async def _serve(core: PacedCore, servicer: PacedServicer, port: int, ready: Connection) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    add = partial(engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer)
    server, _ = await create_server({SERVICE: add}, max_message_bytes=1 << 24)
    address = f"127.0.0.1:{port}"
    server.add_insecure_port(address)
    await server.start()
    ready.send(address)
    task = asyncio.create_task(core.run())
    await stopping.wait()
    task.cancel()
    await server.stop(None)
