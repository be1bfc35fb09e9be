"""An engine of a byte model in this process, without a server, with defaults for tests."""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tokenizers import pre_tokenizers

from benchmarks.fixture import EOS
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.core import EngineCore
from octavo.engine.events import OutputEvent, PrefixChange, StepOutput
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sampling_params import SamplingParams
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts, build
from octavo.v1.engine_pb2 import Failure, Load

SMALL = {"dtype": "float32", "num_blocks": 512, "max_model_len": 1024, "swap_space": 0.1}


@dataclass
class Ended:
    """The result of a request.

    Attributes:
        tokens: Token ids by output.
        reasons: Names of the outputs' ends.
        logprobs: The tokens' log-probabilities by output, if requested.
        times: `time.perf_counter()` when each token came.
        failure: The error of a request without outputs.
    """

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    times: list[float] = field(default_factory=list)
    failure: Failure | None = None


class Runner:
    """An engine of `benchmarks.fixture.make_model`'s model, whose tokens are bytes.

    Any thread may submit requests.
    """

    def __init__(
        self,
        model: str,
        *,
        seconds: float = 20,
        cache_bytes: int = 1 << 28,
        async_scheduling: bool = False,
        **settings: Any,
    ) -> None:
        """Build the engine and start its core.

        Args:
            model: Directory of the model.
            seconds: Processor time that compiling a constraint may take.
            cache_bytes: Memory for compiled constraints.
            async_scheduling: Whether steps overlap, as on a GPU.
            **settings: More of EngineSettings.
        """
        # One thread builds and computes, as OpenMP keeps a pool for each thread that ever computed.
        built: Future[Parts] = Future()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._live,
            args=(EngineSettings(model=model, **(SMALL | settings)), built),
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

    def _live(self, settings: EngineSettings, built: "Future[Parts]") -> None:
        """Build the engine, and run its core."""
        try:
            parts = build(settings)
        except BaseException as error:
            built.set_exception(error)
            raise
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
        **fields: Any,
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

    def run(self, kind: str | None, *texts: str, **options: Any) -> Ended:
        """Submit a request and wait for its end."""
        return self.wait(self.submit(kind, *texts, **options))

    def runs(self, request_id: str) -> bool:
        """Return whether a request has not ended."""
        return bool(self._left[request_id])

    def abort(self, request_id: str) -> None:
        """Abort a request that nobody waits for."""
        self.core.abort(0, request_id)

    def settle(self, seconds: float = 60) -> None:
        """Wait until the engine is idle, and check that no block is in use.

        Raises:
            TimeoutError: The engine is not idle after `seconds`.
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

    def _publish(
        self, outputs: Mapping[int, StepOutput], _changes: Sequence[PrefixChange], _load: Load
    ) -> None:
        now = time.perf_counter()
        with self._changed:
            for step in outputs.values():
                for event in step.outputs:
                    self._take(event, now)
                for failure in step.failures:
                    self.ended[failure.request_id].failure = failure
                    self._left[failure.request_id] = 0
            self._changed.notify_all()

    def _take(self, event: OutputEvent, now: float) -> None:
        ended = self.ended[event.request_id]
        ended.tokens[event.index] += event.token_ids
        ended.times.append(now)
        if event.logprob is not None:
            ended.logprobs[event.index].append(event.logprob.logprob)
        if event.finish_reason is not None:
            ended.reasons[event.index] = event.finish_reason.name
            self._left[event.request_id] -= 1


def _alphabet() -> list[int]:
    """Return the byte of each token, in the order of `benchmarks.fixture.save_tokenizer`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    symbols |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return [symbols[symbol] for symbol in sorted(pre_tokenizers.ByteLevel.alphabet())]


BYTES = _alphabet()


def encode(text: str) -> list[int]:
    """Return the tokens of a text: one for each byte."""
    return [BYTES.index(byte) for byte in text.encode()]


def decode(token_ids) -> str:
    """Return the text of tokens, without the end token."""
    return bytes(BYTES[token] for token in token_ids if token != EOS).decode()
