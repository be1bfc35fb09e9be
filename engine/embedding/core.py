"""The loop that embeds: it takes texts of several requests into one step, as many as fit.

Requests take turns text by text, so that a short one does not wait for all of a long one.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from octavo.engine.core import HEARTBEAT_SECONDS, EngineFailedError
from octavo.engine.embedding.encoder import Encoder, Text
from octavo.engine.events import Publish
from octavo.engine.metrics import EngineMetrics
from octavo.v1.engine_pb2 import Load

log = structlog.get_logger(__name__)


PUBLISH_SECONDS = 0.1
"""Minimum time between two reports of the load while requests run: each takes processor time of
engine and routers, which for short texts would be a good part of a step's."""


class RefusedError(Exception):
    """The engine takes no request now.

    Attributes:
        draining: Whether it drains; else its queue is full.
    """

    def __init__(self, message: str, *, draining: bool) -> None:
        super().__init__(message)
        self.draining = draining


class Embedding:
    """A request: texts, of which some may be embedded already.

    Args:
        texts: The texts.
        dimensions: Number of leading dimensions to return; None: all.
        raw: Whether to return logits as they are.

    Attributes:
        result: The embeddings as little-endian 32-bit floats; cancelling it ends the request.
        arrival: Monotonic time of arrival.
    """

    def __init__(
        self, texts: Sequence[Text], dimensions: int | None = None, *, raw: bool = False
    ) -> None:
        self._dimensions = dimensions
        self._raw = raw
        self.result: Future[bytes] = Future()
        self.arrival = time.monotonic()
        self._texts = texts
        self._done: list[NDArray[np.float32]] = []
        self._taken = 0

    @property
    def left(self) -> int:
        """Number of texts that no step has taken."""
        return len(self._texts) - self._taken

    @property
    def next_size(self) -> int:
        """Tokens of the next text."""
        return len(self._texts[self._taken])

    def take(self) -> Text:
        """Return the next text."""
        self._taken += 1
        return self._texts[self._taken - 1]

    def add(self, embedding: NDArray[np.float32]) -> bool:
        """Add the embedding of the first text without one; return whether it was the last."""
        self._done.append(embedding)
        return len(self._done) == len(self._texts)

    def finish(self, encoder: Encoder) -> bool:
        """Set the result, unless the request was cancelled; return whether it is finite."""
        rows = torch.from_numpy(np.stack(self._done))
        made = encoder.finish(rows, self._dimensions, raw=self._raw).numpy()
        if not np.isfinite(made).all():
            self.fail(ValueError("the model computes NaN or infinity for a text"))
            return False
        self._end(lambda: self.result.set_result(made.astype("<f4").tobytes()))
        return True

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it was cancelled."""
        self._end(lambda: self.result.set_exception(error))

    def _end(self, end: Callable[[], None]) -> None:
        if self.result.set_running_or_notify_cancel():
            end()


class EmbeddingCore:
    """The loop, in its own thread, which owns the encoder.

    Args:
        encoder: The model.
        metrics: The engine's metrics.
        publish: Called with the load, at most every `PUBLISH_SECONDS` while steps run, and at least
            once a second while none does.
        capacity: Tokens that may run or wait here so that the engine has work, in blocks.
        max_tokens: Maximum tokens of a step with several texts.
        max_waiting: Maximum number of requests.
        max_failed_steps: Consecutive failed steps after which the core ends.

    Attributes:
        load: The load after the last step; read from any thread.
        reported: Time of its measurement, in `time.monotonic()` seconds; read from any thread.
    """

    def __init__(
        self,
        encoder: Encoder,
        metrics: EngineMetrics,
        publish: Publish,
        *,
        capacity: int,
        max_tokens: int,
        max_waiting: int,
        max_failed_steps: int,
    ) -> None:
        self._encoder = encoder
        self._metrics = metrics
        self._publish_load = publish
        self._capacity = capacity
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._max_failed = max_failed_steps
        self._failed = 0
        self._calls: SimpleQueue[Embedding | None] = SimpleQueue()  # None wakes the loop
        self._requests: deque[Embedding] = deque()
        # Numbers of open requests; both threads change the set, each time in one operation. It does
        # not hold the requests: a result's callback would then refer to its own request, a cycle
        # that only the garbage collector frees. Until then its arrays fragment the heap, and an
        # engine grew by 300 KB for each long text.
        self._open: set[int] = set()
        self._numbers = count()
        self._draining = self._stopped = False
        self._step_seconds = 0.0
        self._published = 0.0  # the time
        self._due = True  # whether to publish at once
        self.reported = time.monotonic()
        self.load = self._measured()
        metrics.show(lambda: self.load)

    def add(self, request: Embedding) -> None:
        """Queue a request; called in the event loop.

        Raises:
            RefusedError: The engine drains, or too many requests wait.
        """
        if self._draining or self._stopped:
            raise RefusedError("the engine is draining; try another", draining=True)
        if len(self._open) >= self._max_waiting:
            raise RefusedError(f"{self._max_waiting} requests wait already", draining=False)
        number = next(self._numbers)
        self._open.add(number)
        request.result.add_done_callback(lambda _: self._open.discard(number))
        self._calls.put(request)

    def open_session(self, _: int) -> None:
        """Publish the load to a new session."""
        self._calls.put(None)

    def close_session(self, _: int) -> None:
        """Do nothing: a session has no requests."""

    def submit(self, *_: object) -> None:
        """Do nothing: a session has no requests."""

    def abort(self, *_: object) -> None:
        """Do nothing: a session has no requests."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True
        self._calls.put(None)

    def stop(self) -> None:
        """End before the next step."""
        self._stopped = True
        self._calls.put(None)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._open

    def run(self) -> None:
        """Serve until `stop`; then remaining requests fail.

        Raises:
            EngineFailedError: Too many consecutive steps failed.
        """
        try:
            while not self._stopped:
                self._take_calls()
                if self._requests and not self._stopped:
                    self.step()
                self._publish()
        finally:
            with suppress(Empty):
                while True:
                    if (request := self._calls.get_nowait()) is not None:
                        self._requests.append(request)
            for request in self._requests:
                request.fail(RefusedError("the engine stopped", draining=True))
            self._due = True
            self._publish()

    def step(self) -> None:
        """Embed some texts.

        Raises:
            EngineFailedError: Too many consecutive steps failed.
        """
        began = time.monotonic()
        taken = self._schedule()
        if not taken:
            return
        texts = [text for _, text in taken]
        try:
            embeddings = self._encoder.embed(texts).numpy()
        except Exception as error:
            log.exception("step failed", texts=len(texts))
            self._fail(list({id(request): request for request, _ in taken}.values()))
            self._failed += 1
            if self._failed >= self._max_failed:
                raise EngineFailedError(f"{self._failed} steps in a row failed") from error
            return
        self._failed = 0
        self._step_seconds = time.monotonic() - began
        # Before requests finish: the event loop answers them when this thread waits again.
        self._metrics.observe_texts(sum(map(len, texts)), len(texts), self._step_seconds)
        for (request, _), embedding in zip(taken, embeddings, strict=True):
            if request.add(embedding):
                finished = request.finish(self._encoder)
                self._metrics.requests.labels("finished" if finished else "failed").inc()

    def _schedule(self) -> list[tuple[Embedding, Text]]:
        """Return the texts of the next step, with their requests; one at least if any is left."""
        taken: list[tuple[Embedding, Text]] = []
        room = self._max_tokens
        turns = self._requests
        while turns:
            request = turns[0]
            if request.result.cancelled():
                turns.popleft()
                self._metrics.requests.labels("aborted").inc()
                continue
            if taken and request.next_size > room:
                break
            room -= request.next_size
            turns.popleft()
            taken.append((request, request.take()))
            if request.left:
                turns.append(request)
        return taken

    def _fail(self, requests: Sequence[Embedding]) -> None:
        for request in requests:
            with suppress(ValueError):
                self._requests.remove(request)
            request.fail(RuntimeError("a step failed on the engine; its log has the details"))
            self._metrics.requests.labels("failed").inc()

    def _take_calls(self) -> None:
        """Take all new requests; wait a while for one if there is no work."""
        pending = self._published < self.reported
        with suppress(Empty):
            seconds = PUBLISH_SECONDS if pending else HEARTBEAT_SECONDS
            request = self._calls.get(not self._requests, seconds)
            while True:
                if request is None:
                    self._due = True
                else:
                    self._requests.append(request)
                    self._metrics.queue_seconds.observe(time.monotonic() - request.arrival)
                request = self._calls.get_nowait()

    def _publish(self) -> None:
        self.reported = time.monotonic()
        self.load = self._measured()
        if self._due or self.reported - self._published >= PUBLISH_SECONDS:
            self._due, self._published = False, self.reported
            self._publish_load({}, (), self.load)

    def _measured(self) -> Load:
        # A router subtracts what it has sent itself from the free blocks.
        return Load(
            running=len(self._open),
            total_blocks=self._capacity,
            free_blocks=self._capacity,
            step_seconds=self._step_seconds,
            draining=self._draining,
        )
