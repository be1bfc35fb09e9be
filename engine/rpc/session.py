"""One router's stream: converts its messages to calls of the core, and events to messages."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from octavo.common.background import start
from octavo.common.kv_cache.prefix_hash import short_key
from octavo.common.rpc import RpcError
from octavo.engine.events import OutputEvent, PrefixChange, StepOutput
from octavo.engine.rpc.heartbeat import Core
from octavo.engine.rpc.session_images import SessionImages
from octavo.engine.scheduling.request import Request
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.v1 import engine_pb2, sampling_pb2

Translate = Callable[..., Request]
"""Returns the request of a `Submit`; its keywords are the session's number and the images that the
router has sent for it, by digest."""


class Session:
    """Receives a router's requests and sends one message per step.

    If a router reads slowly, steps are merged into one message, so a session buffers at most its
    requests' tokens and the prefix cache's keys.
    """

    def __init__(self, core: Core, translate: Translate) -> None:
        self._core = core
        self._translate = translate
        self._images = SessionImages()
        self._pending = engine_pb2.SessionResponse()
        self._entries: dict[tuple[str, int], engine_pb2.SequenceOutput] = {}  # in `_pending`
        self._numbered: dict[int, engine_pb2.SequenceOutput] = {}  # of these, by their number
        # Changes to send, in memory and on disk: stored, or evicted.
        self._prefixes: tuple[dict[bytes, bool], dict[bytes, bool]] | None = None
        self._ready = asyncio.Event()
        self._closing = False
        self._failed = False

    async def run(
        self, session: int, messages: AsyncIterator[engine_pb2.SessionRequest]
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Serve until the router ends the stream or `close` is called; then stop its requests.

        Raises:
            RpcError: INTERNAL after `fail`.
        """
        reader = start(self._read(session, messages), f"session-{session}")
        reader.add_done_callback(lambda _: self._ready.set())
        self._core.open_session(session)
        try:
            while not (reader.done() or (self._closing and not self._pending.HasField("load"))):
                await self._ready.wait()
                self._ready.clear()
                if self._failed:
                    lost = "the engine lost events of this session; its log has the details"
                    raise RpcError(grpc.StatusCode.INTERNAL, lost)
                response, self._pending = self._pending, engine_pb2.SessionResponse()
                self._entries.clear()
                self._numbered.clear()
                self._put_prefixes(response)
                if response.HasField("load"):
                    yield response
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._core.close_session(session)

    def set_adapters(self, adapters: engine_pb2.Adapters) -> None:
        """Put the loaded adapters into the next message."""
        self._pending.adapters.CopyFrom(adapters)
        self._pending.load.CopyFrom(self._core.load)
        self._ready.set()

    def close(self) -> None:
        """End the stream once pending messages are sent, as the engine stops."""
        self._closing = True
        self._ready.set()

    def fail(self) -> None:
        """End the stream at once with INTERNAL; pending messages are lost."""
        self._failed = True
        self._ready.set()

    async def _read(self, session: int, messages: AsyncIterator[engine_pb2.SessionRequest]) -> None:
        async for message in messages:
            match message.WhichOneof("command"):
                case "image":
                    self._images.add(message.image)
                case "submit":
                    self._submit(session, message.submit)
                case "abort":
                    index = message.abort.index if message.abort.HasField("index") else None
                    self._core.abort(session, message.abort.request_id, index)

    def _submit(self, session: int, submit: engine_pb2.Submit) -> None:
        try:
            request = self._translate(submit, session=session, images=self._images.take())
        except RpcError as error:
            failure = engine_pb2.Failure(
                request_id=submit.request_id,
                code=error.code.value[0],
                message=error.message,
                field=error.field or "",
            )
            self._pending.failures.append(failure)
            self._pending.load.CopyFrom(self._core.load)
            self._ready.set()
            return
        self._core.submit(request)

    def add(self, output: StepOutput, load: engine_pb2.Load) -> None:
        """Put a step's events into the next message."""
        pending = self._pending
        pending.started.extend(output.started)
        pending.failures.extend(output.failures)
        self._add_numbered(output.numbers, output.token_ids)
        for event in output.outputs:
            key = event.request_id, event.index
            if key not in self._entries:
                self._entries[key] = pending.outputs.add(
                    request_id=event.request_id, index=event.index
                )
                if event.number:
                    self._numbered[event.number] = self._entries[key]
            _add_tokens(self._entries[key], event)
        pending.load.CopyFrom(load)
        self._ready.set()

    def _add_numbered(self, numbers: list[int], token_ids: list[int]) -> None:
        """Put tokens into columns, or into an output's existing entry."""
        if self._numbered:  # rare: the router reads slowly
            columns = [list[int](), list[int]()]
            for number, token_id in zip(numbers, token_ids, strict=True):
                if (entry := self._numbered.get(number)) is not None:
                    entry.token_ids.append(token_id)
                    continue
                for column, value in zip(columns, (number, token_id), strict=True):
                    column.append(value)
            numbers, token_ids = columns
        self._pending.tokens.numbers.extend(numbers)
        self._pending.tokens.token_ids.extend(token_ids)

    def add_prefixes(self, change: PrefixChange) -> None:
        """Put a change of the prefix cache into the next message that `add` completes.

        Changes are ignored until the session has received the whole contents. A block stored and
        evicted since the last message, or the reverse, is omitted.
        """
        if change.session is not None:
            self._prefixes = {}, {}
        if self._prefixes is None:
            return
        memory, disk = self._prefixes
        for changes, keys, stored in (
            (memory, change.stored, True),
            (memory, change.evicted, False),
            (disk, change.disk_stored, True),
            (disk, change.disk_removed, False),
        ):
            for key in keys:
                if changes.pop(key, None) is None:
                    changes[key] = stored

    def _put_prefixes(self, response: engine_pb2.SessionResponse) -> None:
        if self._prefixes is None or not any(self._prefixes):
            return
        sent = response.prefixes
        columns = (sent.stored, sent.evicted), (sent.disk_stored, sent.disk_removed)
        for changes, (added, removed) in zip(self._prefixes, columns, strict=True):
            for key, stored in changes.items():
                (added if stored else removed).append(short_key(key))
            changes.clear()


def _add_tokens(output: engine_pb2.SequenceOutput, event: OutputEvent) -> None:
    output.token_ids.extend(event.token_ids)
    if event.logprob is not None:
        output.logprobs.append(_to_logprob(event.logprob))
    if event.prompt_logprobs:
        output.prompt_logprobs.extend(map(_to_logprob, event.prompt_logprobs))
    if event.score is not None:
        output.score = event.score
    if event.drafted_tokens:
        output.drafted_tokens += event.drafted_tokens
        output.accepted_tokens += event.accepted_tokens
    if event.finish_reason is not None:
        output.finish_reason = sampling_pb2.FinishReason.ValueType(event.finish_reason)


def _to_logprob(logprob: TokenLogprob) -> sampling_pb2.TokenLogprob:
    top = [sampling_pb2.TopLogprob(token_id=t, logprob=value) for t, value in logprob.top]
    return sampling_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)
