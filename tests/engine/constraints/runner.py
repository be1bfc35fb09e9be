"""An engine whose core runs in a thread, as constraints are compiled beside it."""

import itertools
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from tokenizers import pre_tokenizers

from octavo.common.sampling_parameters import SamplingParams
from octavo.engine.commands import Abort, Stop, Submit
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.core import EngineCore
from octavo.engine.events import Failure, OutputEvent
from octavo.engine.metrics import EngineMetrics
from octavo.engine.scheduling.request import Request
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build

EOS = 256


@dataclass
class Ended:
    """What came of a request: tokens and end by output, or a failure."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failure: Failure | None = None

    def text(self, index: int = 0) -> str:
        """Return an output as text: the model's tokens are the bytes of the byte alphabet."""
        return decode(self.tokens[index])


class Runner:
    """An engine of a byte model, with a core in a thread."""

    def __init__(self, model: str, *, seconds: float = 20, cache_bytes: int = 1 << 28, **settings):
        defaults = {"dtype": "float32", "num_blocks": 512, "max_model_len": 1024, "swap_space": 0.1}
        self.parts = build(EngineSettings(model=model, **(defaults | settings)))
        self.compiler = ConstraintCompiler(
            self.parts.read_tokens, seconds=seconds, cache_bytes=cache_bytes
        )
        self.metrics = EngineMetrics()
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self.ended: dict[str, Ended] = defaultdict(Ended)
        self._left: dict[str, int] = {}
        self.core = EngineCore(
            self.parts.scheduler,
            self.parts.executor,
            self.metrics,
            self._publish,
            max_waiting=1 << 20,
            constraints=self.compiler,
        )
        self._thread = threading.Thread(target=self.core.run, daemon=True)
        self._thread.start()

    def submit(self, kind, *texts, prompt=(1, 2, 3), max_tokens=300, n=1, **fields) -> str:
        """Submit a request; return its id."""
        names = set(fields) & set(SamplingParams.__dataclass_fields__)
        sampling = {"temperature": 1.5, "n": n} | {name: fields.pop(name) for name in names}
        beam = fields.get("beam")
        constraint = None if kind is None else Constraint(ConstraintKind(kind), texts)
        fields = {"eos_token_ids": frozenset({EOS}), "arrival": time.monotonic()} | fields
        request = Request(
            session=0,
            request_id=str(next(self._ids)),
            prompt=tuple(prompt),
            sampling=SamplingParams(**sampling),
            max_tokens=max_tokens,
            constraint=constraint,
            **fields,
        )
        with self._changed:
            self._left[request.request_id] = beam.width if beam else n
        self.core.send(Submit(request))
        return request.request_id

    def wait(self, request_id: str, seconds: float = 120) -> Ended:
        """Wait for a request's end."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._left[request_id], seconds), "too long"
        return self.ended[request_id]

    def run(self, kind, *texts, **options) -> Ended:
        """Submit a request and wait for its end."""
        return self.wait(self.submit(kind, *texts, **options))

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self.core.send(Abort(0, request_id))

    def settle(self, seconds: float = 60) -> None:
        """Wait until nothing is left, and check that no block is."""
        deadline = time.monotonic() + seconds
        while not self.core.idle:
            assert time.monotonic() < deadline, "too long"
            time.sleep(0.01)
        time.sleep(0.05)
        self.parts.scheduler.cache.check_idle()

    def close(self) -> None:
        self.core.send(Stop())
        self._thread.join(30)

    def _publish(self, events, _load) -> None:
        with self._changed:
            for event in events:
                self._take(event)
            self._changed.notify_all()

    def _take(self, event) -> None:
        if isinstance(event, OutputEvent):
            ended = self.ended[event.request_id]
            ended.tokens[event.index] += event.token_ids
            if event.logprob is not None:
                ended.logprobs[event.index].append(event.logprob.logprob)
            if event.finish_reason is not None:
                ended.reasons[event.index] = event.finish_reason.name
                self._left[event.request_id] -= 1
        elif isinstance(event, Failure):
            self.ended[event.request_id].failure = event
            self._left[event.request_id] = 0


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
    """Return the text of tokens, without the end."""
    return bytes(BYTES[token] for token in token_ids if token != EOS).decode()
