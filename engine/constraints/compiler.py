"""Compiles constraints in the background, once each, and creates requests' matchers."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np
import structlog
from llguidance import LLMatcher, LLTokenizer

from octavo.common.background import keep_thread_running
from octavo.common.models.errors import ModelError
from octavo.common.thread_priority import lower_priority, run_when_idle
from octavo.engine.constraints.constraint import Constraint, ConstraintError
from octavo.engine.constraints.grammar import compile_grammar
from octavo.engine.constraints.matcher import WORD_BITS, EndRule, Matcher
from octavo.engine.constraints.sandbox_process import Sandbox, TrialTooSlowError
from octavo.engine.constraints.token_table import TokenTable

log = structlog.get_logger(__name__)

LIGHT_SECONDS = 0.05
"""Processor time of a trial above which a constraint is heavy."""
REFUSED_BYTES = 1024
"""Bytes that a refused constraint counts for in the cache, besides its text."""


class TokensMissingError(Exception):
    """The model's tokenizer cannot be used for constraints; the message says why."""


Outcome = list[Matcher] | ConstraintError | TokensMissingError
"""A request's matchers, one per output, or the reason why there are none."""
_State: TypeAlias = LLMatcher | ConstraintError | TokensMissingError
"""The outcome of a constraint."""


@dataclass(slots=True, eq=False)
class Preparation:
    """A request that waits for its matchers.

    Attributes:
        constraint: The constraint to compile.
        outputs: The existing tokens of each output.
        rule: The rule for the ends of outputs.
        done: Called in another thread with the outcome.
        cancelled: Whether the request has ended; set by any thread.
    """

    constraint: Constraint
    outputs: Sequence[Sequence[int]]
    rule: EndRule
    done: Callable[[Outcome], None]
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled constraint, or its error; copies of `state` share most of its memory."""

    state: LLMatcher | ConstraintError
    bytes: int


@dataclass(frozen=True, slots=True)
class _Lane:
    """A queue of constraints and its compiling thread.

    Attributes:
        name: The thread's name.
        heavy: Whether they are compiled at the lowest priority.
        queue: Constraints to compile; None ends the thread.
    """

    name: str
    heavy: bool
    queue: "SimpleQueue[Constraint | None]" = field(default_factory=SimpleQueue)


class ConstraintCompiler:
    """Low-priority threads that compile constraints, and the cache of compiled constraints.

    Another process tries a constraint first (`sandbox.py`): a constraint that takes too long, takes
    too much memory or crashes the library is refused and harms no other request. Slow constraints
    have their own queue and thread, so that the others do not wait.

    Attributes:
        counters: Numbers of constraints `compiled` and `refused` since the start, and of requests
            whose constraint was `cached`: compiled already, or being compiled.
    """

    def __init__(
        self,
        read_tokens: Callable[[], TokenTable],
        *,
        seconds: float,
        cache_bytes: int,
        observe: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """Set up the compiler; only the first constraint starts threads and reads the tokens.

        Args:
            read_tokens: Returns the model's tokens, or raises ModelError or OSError.
            seconds: Processor time that compiling a constraint may take.
            cache_bytes: Maximum memory of compiled constraints that no request uses.
            observe: Called in another thread with each one's seconds, including its trial.
        """
        self._light = _Lane("constraints", heavy=False)
        self._heavy = _Lane("heavy-constraints", heavy=True)
        self._read_tokens = read_tokens
        self._seconds = seconds
        self._cache_bytes = cache_bytes
        self._observe = observe
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._table: TokenTable | None = None
        self._tokens: LLTokenizer | TokensMissingError | None = None
        self._cache: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._compiling: dict[Constraint, list[Preparation]] = {}
        self._to_finish: SimpleQueue[tuple[Preparation, LLMatcher] | None] = SimpleQueue()
        self._started = False
        self.counters = Counter(compiled=0, refused=0, cached=0)

    def prepare(self, preparation: Preparation) -> None:
        """Create a request's matchers in the background; `done` is called with the outcome."""
        constraint = preparation.constraint
        with self._lock:
            self._start()
            cached = self._cache.get(constraint)
            if cached is not None:
                self._cache.move_to_end(constraint)
                self.counters["cached"] += 1
            elif constraint in self._compiling:
                self._compiling[constraint].append(preparation)
                self.counters["cached"] += 1
            else:
                self._compiling[constraint] = [preparation]
                self._light.queue.put(constraint)
        if cached is not None:
            self._hand_over(preparation, cached.state)

    def close(self) -> None:
        """End the threads after their current work."""
        for lane in (self._light, self._heavy):
            lane.queue.put(None)
        self._to_finish.put(None)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for lane in (self._light, self._heavy):
            keep_thread_running(partial(self._compile_all, lane), lane.name)
        keep_thread_running(self._finish_all, "constraints-ready")

    def _hand_over(
        self,
        preparation: Preparation,
        state: _State,
    ) -> None:
        if preparation.cancelled:
            return
        if isinstance(state, LLMatcher):
            self._to_finish.put((preparation, state))
        else:
            preparation.done(state)

    # The threads.

    def _compile_all(self, lane: _Lane) -> None:
        lower_priority()
        tokens = self._load()
        sandbox = None
        if self._table is not None:
            seconds = self._seconds if lane.heavy else min(LIGHT_SECONDS, self._seconds)
            sandbox = Sandbox(self._table, seconds, when_idle=lane.heavy)
        try:
            while (constraint := lane.queue.get()) is not None:
                state: _State | None
                if sandbox is None or isinstance(tokens, TokensMissingError):
                    assert isinstance(tokens, TokensMissingError)
                    state = tokens
                elif self._wanted(constraint):
                    state = self._compile(constraint, tokens, sandbox, lane)
                else:
                    continue
                if state is None:
                    self._heavy.queue.put(constraint)
                    continue
                with self._lock:
                    waiting = self._compiling.pop(constraint)
                for preparation in waiting:
                    self._hand_over(preparation, state)
                del waiting, state  # otherwise locals would keep requests alive
        finally:
            if sandbox is not None:
                sandbox.close()

    def _wanted(self, constraint: Constraint) -> bool:
        """Return whether any request still waits for a constraint; else forget it."""
        with self._lock:
            if all(preparation.cancelled for preparation in self._compiling[constraint]):
                del self._compiling[constraint]
                return False
        return True

    def _compile(
        self, constraint: Constraint, tokens: LLTokenizer, sandbox: Sandbox, lane: _Lane
    ) -> LLMatcher | ConstraintError | None:
        """Try and compile a constraint, and cache the outcome; None for the heavy lane."""
        began = time.perf_counter()
        text = sum(map(len, constraint.texts))
        state: LLMatcher | ConstraintError
        try:
            size = sandbox.check(constraint)
            state = (_compile_when_idle if lane.heavy else compile_grammar)(constraint, tokens)
        except ConstraintError as error:
            if isinstance(error, TrialTooSlowError) and not lane.heavy:
                return None
            state, size = error, REFUSED_BYTES
        seconds = time.perf_counter() - began
        self._observe(seconds)
        refused = isinstance(state, ConstraintError)
        log.info(
            "constraint refused" if refused else "constraint compiled",
            kind=constraint.kind.value,
            characters=text,
            seconds=round(seconds, 3),
            **({"reason": str(state)} if refused else {"bytes": size}),
        )
        with self._lock:
            self.counters["refused" if refused else "compiled"] += 1
            dropped = self._keep(constraint, _Compiled(state, size + text))
        del dropped  # takes milliseconds, so without the lock
        return state

    def _keep(self, constraint: Constraint, compiled: _Compiled) -> list[_Compiled]:
        """Cache a constraint; return the least recently used ones that it evicts."""
        self._cache[constraint] = compiled
        self._cached_bytes += compiled.bytes
        dropped: list[_Compiled] = []
        while self._cached_bytes > self._cache_bytes and self._cache:
            dropped.append(self._cache.popitem(last=False)[1])
            self._cached_bytes -= dropped[-1].bytes
        return dropped

    def _load(self) -> LLTokenizer | TokensMissingError:
        """Return the model's tokens; the first thread reads them."""
        with self._loading:
            if self._tokens is None:
                began = time.perf_counter()
                try:
                    self._table = self._read_tokens()
                    self._tokens = self._table.build()
                except (ModelError, OSError, ValueError) as error:
                    self._table, self._tokens = None, TokensMissingError(str(error))
                    log.warning("no constraints: the tokenizer cannot be used", reason=str(error))
                else:
                    seconds = round(time.perf_counter() - began, 2)
                    log.info("constraints ready", tokens=self._table.size, seconds=seconds)
            return self._tokens

    def _finish_all(self) -> None:
        lower_priority()
        while (job := self._to_finish.get()) is not None:
            preparation, state = job
            if not preparation.cancelled:
                preparation.done(self._matchers(preparation, state))
            del job, preparation, state

    def _matchers(self, preparation: Preparation, state: LLMatcher) -> Outcome:
        """Return a matcher for each output, after its existing tokens."""
        assert self._table is not None
        words = (self._table.size + WORD_BITS - 1) // WORD_BITS
        matchers = []
        for index, token_ids in enumerate(preparation.outputs):
            matcher = Matcher(state.deep_copy(), words, preparation.rule)
            matcher.advance(token_ids)
            matcher.seconds = 0.0  # the output is complete
            if matcher.error is not None:
                after = f"after the {len(token_ids)} tokens of output {index}: "
                return ConstraintError(after + matcher.error)
            matchers.append(matcher)
        return matchers


def _compile_when_idle(constraint: Constraint, tokens: LLTokenizer) -> LLMatcher:
    """Compile a constraint in a new thread, as a thread cannot leave idle priority again.

    Also compute its first mask, as the matcher's copies share that work.

    Raises:
        ConstraintError: See `compile_grammar`.
    """

    def compile_and_mask() -> LLMatcher:
        state = compile_grammar(constraint, tokens)
        mask = np.empty((tokens.vocab_size + WORD_BITS - 1) // WORD_BITS, np.int32)
        state.deep_copy().unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return state

    with ThreadPoolExecutor(1, "heavy-constraint", run_when_idle) as thread:
        return thread.submit(compile_and_mask).result()
