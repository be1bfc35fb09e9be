"""An engine in this process, without a server: its core runs in a thread."""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.core import EngineCore
from octavo.engine.events import Event, Failure, Load, OutputEvent
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import Parts, build
from octavo.kernels import cpu


@dataclass
class Ended:
    """What came of a request.

    Attributes:
        tokens: By output.
        reasons: Names of their ends, by output.
        logprobs: Of their tokens, if asked for.
        times: When its tokens came, in `time.perf_counter()` seconds.
        failure: Why it has no outputs.
    """

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    times: list[float] = field(default_factory=list)
    failure: Failure | None = None


class OneEngine:
    """An engine of a model; requests are submitted from any thread."""

    def __init__(
        self,
        model: str,
        *,
        seconds: float = 20,
        cache_bytes: int = 1 << 28,
        async_scheduling: bool = False,
        pin: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Build the engine and start its core.

        Args:
            model: Directory of the model.
            seconds: Processor time that compiling a constraint may take.
            cache_bytes: Memory for compiled constraints.
            async_scheduling: Whether steps overlap, as on a GPU.
            pin: Whether threads are pinned to cores, as a server's are.
            **settings: More of EngineSettings.
        """
        # One thread builds and computes, as OpenMP keeps threads for each that ever computed.
        built: Future[Parts] = Future()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._live,
            args=(EngineSettings(model=model, **settings), pin, built),
            daemon=True,
        )
        self._thread.start()
        self.parts = built.result()
        assert self.parts.read_tokens is not None
        self.compiler = ConstraintCompiler(
            self.parts.read_tokens, seconds=seconds, cache_bytes=cache_bytes
        )
        self.metrics = EngineMetrics()
        self.ended: dict[str, Ended] = defaultdict(Ended)
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._left: dict[str, int] = {}
        self.core = EngineCore(
            self.parts.scheduler,
            self.parts.executor,
            self.metrics,
            self._publish,
            max_waiting=1 << 20,
            async_scheduling=async_scheduling,
            constraints=self.compiler,
        )
        self._ready.set()

    def _live(self, settings: EngineSettings, pin: bool, built: "Future[Parts]") -> None:
        """Build the engine, and run its core."""
        try:
            parts = build(settings)
        except BaseException as error:
            built.set_exception(error)
            raise
        if pin:
            cpu.pin_threads(parts.threads.places)
        built.set_result(parts)
        self._ready.wait()
        self.core.run()

    def submit(
        self,
        kind: str | None,
        *texts: str,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 300,
        n: int = 1,
        **fields: Any,  # noqa: ANN401
    ) -> str:
        """Submit a request, constrained unless `kind` is None; return its id.

        Args:
            kind: Kind of the constraint.
            *texts: Its texts.
            prompt: The prompt's tokens.
            max_tokens: Maximum tokens per output.
            n: Outputs.
            **fields: More of SamplingParams and Request.
        """
        names = set(fields) & set(SamplingParams.__dataclass_fields__)
        sampling = {"temperature": 1.5, "n": n} | {name: fields.pop(name) for name in names}
        beam = fields.get("beam")
        eos = {"eos_token_ids": frozenset(self.parts.eos_token_ids)}
        request = Request(
            session=0,
            request_id=str(next(self._ids)),
            prompt=tuple(prompt),
            sampling=SamplingParams(**sampling),
            max_tokens=max_tokens,
            constraint=None if kind is None else Constraint(ConstraintKind(kind), texts),
            **({"arrival": time.monotonic()} | eos | fields),
        )
        with self._changed:
            self._left[request.request_id] = beam.width if beam else n
        self.core.submit(request)
        return request.request_id

    def wait(self, request_id: str, seconds: float = 120) -> Ended:
        """Wait for a request's end.

        Raises:
            TimeoutError: It has not ended within `seconds`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._left[request_id], seconds):
                raise TimeoutError(f"request {request_id} has not ended in {seconds} s")
        return self.ended[request_id]

    def run(self, kind: str | None, *texts: str, **options: Any) -> Ended:  # noqa: ANN401
        """Submit a request and wait for its end."""
        return self.wait(self.submit(kind, *texts, **options))

    def runs(self, request_id: str) -> bool:
        """Return whether a request has not ended."""
        return bool(self._left[request_id])

    def abort(self, request_id: str) -> None:
        """Abort a request; nobody may wait for it."""
        self.core.abort(0, request_id)

    def settle(self, seconds: float = 60) -> None:
        """Wait until nothing is left, and check that no block is.

        Raises:
            TimeoutError: Something is left after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self.core.idle:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is not idle after {seconds} s")
            time.sleep(0.01)
        time.sleep(0.05)
        self.parts.scheduler.cache.check_idle()

    def close(self) -> None:
        """Stop the core."""
        self.core.stop()
        self._thread.join(30)

    def _publish(self, events: list[Event], _: Load) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                self._take(event, now)
            self._changed.notify_all()

    def _take(self, event: Event, now: float) -> None:
        ended = self.ended[event.request_id]
        if isinstance(event, OutputEvent):
            ended.tokens[event.index] += event.token_ids
            ended.times.append(now)
            if event.logprob is not None:
                ended.logprobs[event.index].append(event.logprob.logprob)
            if event.finish_reason is not None:
                ended.reasons[event.index] = event.finish_reason.name
                self._left[event.request_id] -= 1
        elif isinstance(event, Failure):
            ended.failure = event
            self._left[event.request_id] = 0
