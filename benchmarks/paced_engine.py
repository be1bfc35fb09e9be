"""An engine without a model: real gRPC and the real sessions, and a step every so many seconds.

What it serves is as fast as it is told to be, whatever else the machine does:
so a benchmark sees the router in front of it, and knows its capacity. Each step
gives every running sequence one token; as many run as there are places, in the
order of coming; requests end with LENGTH, or at their deadline.
"""

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from benchmarks.fleet import CONTEXT, EOS, VOCABULARY, Node
from octavo.common import logging
from octavo.common.rpc import create_server
from octavo.engine.events import Failure, FailureCode, Load, Output, Started
from octavo.engine.kv_cache import CacheStats
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.session import Session, to_load
from octavo.v1 import engine_pb2, engine_pb2_grpc

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
BLOCK_SIZE = 16
LETTERS = range(64, 90)
"""Tokens that are one letter each in the tokenizer of bytes."""
HEARTBEAT_SECONDS = 1.0


@dataclass(slots=True)
class Running:
    """A request at work."""

    session: int
    submit: engine_pb2.Submit
    sequences: int
    deadline: float | None
    drawn: int = 0


class PacedCore:
    """What sessions take for the engine's core."""

    def __init__(self, step_seconds: float, max_num_seqs: int) -> None:
        self._step_seconds = step_seconds
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self.sessions: dict[int, Session] = {}

    @property
    def load(self) -> Load:
        """The load; of blocks there are always enough."""
        stats = CacheStats(1 << 20, 1 << 20, 0, 0, 0, 0, 0, 0)
        return Load(len(self._running), len(self._waiting), 0, stats, self._step_seconds, False)

    def open_session(self, session: int) -> None:
        """Says at once that it lives."""
        self.sessions[session].add((), to_load(self.load))

    def close_session(self, session: int) -> None:
        """Stops a session's requests."""
        self._running = [r for r in self._running if r.session != session]
        self._waiting = deque(r for r in self._waiting if r.session != session)

    def submit(self, request: Running) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def abort(self, session: int, request_id: str, _: int | None) -> None:
        """Stops a request."""
        for queue in (self._running, self._waiting):
            for request in queue:
                if (request.session, request.submit.request_id) == (session, request_id):
                    queue.remove(request)
                    return

    async def run(self) -> None:
        """Steps for ever, as often as it is to; says that it lives while there is nothing to do."""
        due = spoke = time.monotonic()
        while True:
            due = max(due + self._step_seconds, time.monotonic() - self._step_seconds)
            await asyncio.sleep(due - time.monotonic())
            if self._running or self._waiting or time.monotonic() > spoke + HEARTBEAT_SECONDS:
                spoke = time.monotonic()
                self._step()

    def _step(self) -> None:
        events: dict[int, list[Any]] = {number: [] for number in self.sessions}
        self._admit(events)
        ended = []
        for request in self._running:
            submit = request.submit
            if request.deadline is not None and time.monotonic() > request.deadline:
                failure = FailureCode.DEADLINE_EXCEEDED, "the deadline passed"
                events[request.session].append(
                    Failure(request.session, submit.request_id, *failure)
                )
                ended.append(request)
                continue
            request.drawn += 1
            last = request.drawn == submit.stop.max_tokens
            token = LETTERS[request.drawn % len(LETTERS)]
            reason = FinishReason.LENGTH if last else None
            events[request.session].extend(
                Output(request.session, submit.request_id, i, [token], None, [], reason)
                for i in range(request.sequences)
            )
            if last:
                ended.append(request)
        for request in ended:
            self._running.remove(request)
        load = to_load(self.load)
        for number, session in self.sessions.items():
            session.add(events[number], load)

    def _admit(self, events: dict[int, list[Any]]) -> None:
        places = self._max_num_seqs - sum(r.sequences for r in self._running)
        while self._waiting and self._waiting[0].sequences <= places:
            request = self._waiting.popleft()
            places -= request.sequences
            self._running.append(request)
            events[request.session].append(Started(request.session, request.submit.request_id, 0))


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
            block_size=BLOCK_SIZE,
            eos_token_ids=[EOS],
            load=to_load(core.load),
        )

    async def GetEngineInfo(self, request: Any, context: Any) -> Any:  # noqa: ANN401, ARG002, N802
        """Says what it is."""
        return self._info

    async def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: ANN401, ARG002, N802
        """Carries a router's requests and tokens."""
        number = next(self._ids)
        session = Session(self._core, partial(_to_request, number))  # type: ignore[arg-type]
        self._core.sessions[number] = session
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            del self._core.sessions[number]


def _to_request(session: int, submit: engine_pb2.Submit) -> Any:  # noqa: ANN401
    sequences = submit.sampling.n if submit.sampling.HasField("n") else 1
    deadline = None
    if submit.HasField("timeout"):
        deadline = time.monotonic() + submit.timeout.ToTimedelta().total_seconds()
    return Running(session, submit, sequences, deadline)


def paced_engine(tokenizer: str, *, step_seconds: float, max_num_seqs: int) -> Node:
    """A paced engine as a process.

    Args:
        tokenizer: directory with the fleet's tokenizer of bytes.
        step_seconds: a step takes.
        max_num_seqs: run at most.
    """
    settings = SimpleNamespace(tokenizer=tokenizer, step=step_seconds, places=max_num_seqs)
    return Node(partial(_run, settings))


def _run(settings: SimpleNamespace, port: int, ready: Connection) -> None:
    logging.configure("console", "error")
    asyncio.run(_serve(settings, port, ready))


async def _serve(settings: SimpleNamespace, port: int, ready: Connection) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    core = PacedCore(settings.step, settings.places)
    servicer = PacedServicer(settings.tokenizer, core, settings.places)
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
