"""gRPC calls that no well-behaved client makes, and the allowed answers."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.text_format import MessageToString
from grpc_health.v1 import health_pb2

from benchmarks.fuzz import messages
from octavo.v1 import engine_pb2, generation_pb2

GENERATION = "/octavo.v1.GenerationService/"
ENGINE = "/octavo.v1.EngineService/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"

PROPER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Status codes for a caller's mistakes. The servers are up, so UNAVAILABLE is not allowed."""
PATIENCE = 5.0
"""Deadline in seconds of calls that do not test deadlines."""
SLACK = 20.0
"""Seconds past its deadline after which a call counts as hanging."""
SHOWN = 400
"""Maximum printed characters of a request."""
UNHEARD = "Internal error from Core"
"""Message of grpc.aio's client when a call ends while sending; it loses the status."""
SESSION_ORDERS = 25

METHODS: dict[str, type[Message]] = {
    f"{GENERATION}Generate": generation_pb2.GenerateRequest,
    f"{GENERATION}Tokenize": generation_pb2.TokenizeRequest,
    f"{GENERATION}Detokenize": generation_pb2.DetokenizeRequest,
    f"{GENERATION}ListModels": generation_pb2.ListModelsRequest,
    f"{GENERATION}Nothing": generation_pb2.ListModelsRequest,
    f"{HEALTH}Check": health_pb2.HealthCheckRequest,
    f"{ENGINE}GetEngineInfo": engine_pb2.GetEngineInfoRequest,
    f"{ENGINE}Session": engine_pb2.SessionRequest,
    f"{REFLECTION}ServerReflectionInfo": health_pb2.HealthCheckRequest,
}
StreamCall = grpc.aio.StreamStreamCall[bytes, bytes] | grpc.aio.UnaryStreamCall[bytes, bytes]
WEIGHTS = (60, 10, 8, 2, 1, 2, 2, 20, 1)


class FaultError(Exception):
    """A server broke a rule that this fuzzer checks."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        method: Its full name.
        requests: The messages to send, in bytes.
        deadline: Deadline in seconds.
        cancel: Seconds until cancellation; None for never.
        pause: Seconds between requests.
        linger: Seconds from the last request to the end of sending.
        metadata: Metadata to send.
    """

    method: str
    requests: tuple[bytes, ...]
    deadline: float
    cancel: float | None
    pause: float
    linger: float
    metadata: tuple[tuple[str, str | bytes], ...]

    @property
    def on_engine(self) -> bool:
        """Whether the call goes to the engine's port."""
        return self.method.startswith(ENGINE)

    def __str__(self) -> str:
        kind = METHODS[self.method]
        lines = [f"{self.method} deadline={self.deadline:.4f} cancel={self.cancel}"]
        lines += [f"metadata={self.metadata}"] if self.metadata else []
        for request in self.requests:
            try:
                text = MessageToString(kind.FromString(request), as_one_line=True)
            except DecodeError:
                text = f"bytes {request.hex()}"
            lines.append(f"{text[:SHOWN]}{'…' * (len(text) > SHOWN)}")
        return "\n  ".join(lines)


def make(rng: random.Random) -> Case:
    """Return a random call."""
    (method,) = rng.choices(list(METHODS), WEIGHTS)
    if method.endswith("Session"):
        count = rng.randint(1, SESSION_ORDERS)
        requests = [_order(rng) for _ in range(count)]
    else:
        count = rng.choice((0, 2)) if rng.random() < 0.02 else 1
        requests = [_body(METHODS[method], rng) for _ in range(count)]
    hurry = rng.random() < 0.35
    return Case(
        method=method,
        requests=tuple(requests),
        deadline=rng.uniform(0, 0.05) if hurry else PATIENCE,
        cancel=rng.uniform(0, 0.05) if rng.random() < 0.2 else None,
        pause=rng.choice((0, 0, 0.001, 0.01)),
        linger=rng.choice((0, 0.02, 0.2)) if method.endswith("Session") else 0,
        metadata=_metadata(rng),
    )


def _body(kind: type[Message], rng: random.Random) -> bytes:
    if kind is generation_pb2.GenerateRequest and rng.random() < 0.75:
        message: Message = messages.generate(rng)
        for _ in range(rng.choice((0, 1, 1, 2))):
            messages.disturb(message, rng)
    else:
        message = messages.wild(kind, rng)
    data = message.SerializeToString()
    return messages.mutate(data, rng) if rng.random() < 0.25 else data


def _order(rng: random.Random) -> bytes:
    order = engine_pb2.SessionRequest()
    kind = rng.random()
    if kind < 0.6:
        order.submit.CopyFrom(messages.submit(rng))
        if rng.random() < 0.5:
            messages.disturb(order.submit, rng)
    elif kind < 0.9:
        order.abort.CopyFrom(messages.wild(engine_pb2.Abort, rng))
    else:
        order = messages.wild(engine_pb2.SessionRequest, rng)
    data = order.SerializeToString()
    # A message that does not parse ends the session, and so the rest of the case.
    return messages.mutate(data, rng) if rng.random() < 0.05 else data


def _metadata(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    if rng.random() > 0.1:
        return ()
    trace = rng.choice(("", "00-x", f"00-{'f' * 32}-{'0' * 16}-ff", "ff-" * 99))
    return (
        ("traceparent", trace),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("authorization", "x" * rng.choice((0, 10, 3000))),
        ("x-bin", rng.randbytes(rng.randrange(50))),
    )


async def run(case: Case, channel: grpc.aio.Channel) -> str:
    """Make a call; return the name of its status code.

    Raises:
        FaultError: The answer was not a proper one.
    """
    call = _start(case, channel)
    handle = None
    if case.cancel is not None:
        handle = asyncio.get_running_loop().call_later(case.cancel, call.cancel)
    answers: list[bytes] = []
    try:
        async with asyncio.timeout(case.deadline + SLACK):
            try:
                while isinstance(answer := await call.read(), bytes):
                    answers.append(answer)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # something else than the call was cancelled
            except grpc.aio.AioRpcError:
                pass
            code, details = await call.code(), await call.details()
    except TimeoutError:
        call.cancel()
        raise FaultError(f"nothing was heard for {SLACK:g} s after the deadline") from None
    finally:
        if handle is not None:
            handle.cancel()
    if details == UNHEARD:
        return "not heard"
    if code not in PROPER:
        raise FaultError(f"{code.name}: {details}")
    if case.method.endswith("/Generate") and code is grpc.StatusCode.OK:
        _check_stream([generation_pb2.GenerateResponse.FromString(answer) for answer in answers])
    if case.on_engine and case.method.endswith("/Session"):
        _check_session([engine_pb2.SessionResponse.FromString(answer) for answer in answers])
    return code.name


def _start(case: Case, channel: grpc.aio.Channel) -> StreamCall:
    """Call as a client of the method would, or with too many or too few requests."""
    options = {"timeout": case.deadline, "metadata": case.metadata}
    if case.method.endswith("/Session") or len(case.requests) != 1:
        return channel.stream_stream(case.method)(_paced(case), **options)
    return channel.unary_stream(case.method)(case.requests[0], **options)


async def _paced(case: Case) -> AsyncIterator[bytes]:
    for request in case.requests:
        yield request
        if case.pause:
            await asyncio.sleep(case.pause)
    if case.linger:
        await asyncio.sleep(case.linger)


def _check_stream(responses: list[generation_pb2.GenerateResponse]) -> None:
    """Check that a completed stream has Accepted, Deltas, and one Finished for each output."""
    kinds = [response.WhichOneof("event") for response in responses]
    if kinds[:1] != ["accepted"] or kinds.count("accepted") != 1:
        raise FaultError(f"a stream must begin with its one Accepted: {kinds[:20]}")
    finished: set[int] = set()
    for response in responses[1:]:
        index = response.finished.index if response.HasField("finished") else response.delta.index
        if index in finished:
            raise FaultError(f"output {index} goes on after its end")
        if response.HasField("finished"):
            finished.add(index)
    if not finished or finished != set(range(len(finished))):
        raise FaultError(f"outputs {sorted(finished)} were finished")


def _check_session(responses: list[engine_pb2.SessionResponse]) -> None:
    for response in responses:
        for failure in response.failures:
            if failure.code not in {code.value[0] for code in PROPER}:
                raise FaultError(f"a request failed with {failure.code}: {failure.message}")
