"""Bad input against real processes: each kind gets a precise error, and others are served."""

import math
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from octavo.v1 import engine_pb2, engine_pb2_grpc, generation_pb2, generation_pb2_grpc, sampling_pb2
from tests.integration.harness import wait_until

CONTEXT = 2048
VOCAB = 49152
OUTPUTS = 64
GENERATE = "/octavo.v1.GenerationService/Generate"
SESSION = "/octavo.v1.EngineService/Session"
FEW_BLOCKS = 8
BLOCK = 16

# Greedy decoding continues the count with large margins, so batch-dependent rounding cannot change
# a token.
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9,"


def good(max_tokens=8, **fields):
    """Return a valid request, except for `fields`."""
    request = generation_pb2.GenerateRequest(
        stop=sampling_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=sampling_pb2.OutputOptions(token_ids=True),
    )
    if not {"text", "chat", "tokens"} & fields.keys():
        fields["text"] = COUNTING
    request.MergeFrom(generation_pb2.GenerateRequest(**fields))
    return request


def sampling(**fields):
    return good(sampling=sampling_pb2.SamplingParams(**fields))


def stop(**fields):
    return good(stop=sampling_pb2.StopConditions(**fields))


def output(**fields):
    return good(output=sampling_pb2.OutputOptions(**fields))


def chat(*messages):
    return generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role=role, content=text) for role, text in messages]
    )


def tokens(*token_ids):
    return good(tokens=generation_pb2.TokenPrompt(token_ids=token_ids))


def beam(width=2, **fields):
    return good(beam=sampling_pb2.BeamSearchParams(width=width), **fields)


def not_utf8(request):
    """Return the request's bytes with every "@@" replaced by two bytes that are invalid UTF-8."""
    return request.SerializeToString().replace(b"@@", b"\xff\xfe")


@dataclass(frozen=True)
class Case:
    """A bad request, as a message or as bytes, and the expected error."""

    name: str
    request: generation_pb2.GenerateRequest | bytes
    code: StatusCode
    field: str | None
    says: str
    method: str = GENERATE
    timeout: float = 60


def invalid(name, request, field, says):
    return Case(name, request, StatusCode.INVALID_ARGUMENT, field, says)


TOO_LONG = f"at most {CONTEXT - 1} tokens"
TOKEN_RANGE = f"[0, {VOCAB - 1}]"
ROLES = "system, developer, user, assistant, tool"

CASES = [
    invalid("no prompt", b"", "prompt", "must be set"),
    invalid("long text", good(text="one " * CONTEXT), "prompt", TOO_LONG),
    invalid("long chat", good(chat=chat(("user", "one " * CONTEXT))), "prompt", TOO_LONG),
    invalid("one token too many", tokens(*[5] * CONTEXT), "prompt", TOO_LONG),
    invalid("token id", tokens(5, VOCAB), "tokens.token_ids[1]", TOKEN_RANGE),
    invalid(
        "role", good(chat=chat(("user", "a"), ("wizard", "b"))), "chat.messages[1].role", ROLES
    ),
    invalid("n", sampling(n=OUTPUTS + 1), "sampling.n", f"[1, {OUTPUTS}]"),
    invalid("temperature", sampling(temperature=math.nan), "sampling.temperature", "[0, 100]"),
    invalid(
        "biased token",
        sampling(logit_bias={VOCAB: 1}),
        f"sampling.logit_bias[{VOCAB}]",
        TOKEN_RANGE,
    ),
    invalid(
        "beyond the context",
        good(tokens=generation_pb2.TokenPrompt(token_ids=[5] * 100), max_tokens=CONTEXT - 99),
        "stop.max_tokens",
        f"[1, {CONTEXT - 100}]",
    ),
    invalid("beam and sampling", beam(sampling={}), "beam", "excludes sampling"),
    invalid("beam, stops", beam(stop={"strings": ["a"]}), "stop.strings", "with beam search"),
    invalid("beam, logprobs", beam(output={"logprobs": 1}), "output.logprobs", "with beam search"),
    Case("model", good(model="gpt"), StatusCode.NOT_FOUND, "model", "there is: demo"),
    *(
        invalid(f"{field} not UTF-8", not_utf8(request), None, "not UTF-8")
        for field, request in (
            ("text", good(text="a@@")),
            ("chat.messages[1].content", good(chat=chat(("user", "a"), ("user", "b@@")))),
            ("model", good(model="@@")),
        )
    ),
    invalid("garbage", b"\xff" * 40, None, "not a valid protobuf GenerateRequest"),
    invalid(
        "cut short", good().SerializeToString()[:-1], None, "not a valid protobuf GenerateRequest"
    ),
    Case(
        "message too large",
        good(text="a" * (4 << 20)),
        StatusCode.RESOURCE_EXHAUSTED,
        None,
        str(4 << 20),
    ),
    Case("no time", good(500), StatusCode.DEADLINE_EXCEEDED, None, "", timeout=0.001),
    Case("little time", good(1500), StatusCode.DEADLINE_EXCEEDED, None, "", timeout=0.1),
    *(
        Case(method, b"", StatusCode.UNIMPLEMENTED, None, "", method=method)
        for method in ("/octavo.v1.GenerationService/Nothing", "/octavo.v2.Nothing/Generate")
    ),
]
"""One case of each kind; tests/router/requests/test_validation.py has every field and range."""


@dataclass(frozen=True)
class Refusal:
    """A call's error, and the number of responses before it."""

    code: StatusCode
    message: str
    fields: list[str]
    responses: int


def call(channel, request, method=GENERATE, timeout=60.0):
    """Return a Generate call's stream, through the generated stub if the request is a message."""
    if isinstance(request, bytes):
        return channel.unary_stream(method)(request, timeout=timeout)
    return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout)


def refusal(stream):
    """Return the error of a stream that must fail."""
    responses = 0
    try:
        for _ in stream:
            responses += 1
    except grpc.RpcError as error:
        return as_refusal(error, responses)
    raise AssertionError(f"it was served, with {responses} responses")


def as_refusal(error, responses=0):
    fields = []
    status = rpc_status.from_call(error)  # raises if code or message differ from the details'
    for detail in status.details if status else ():
        bad = error_details_pb2.BadRequest()
        if not detail.Unpack(bad):
            known = error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo
            assert any(detail.Is(kind.DESCRIPTOR) for kind in known), detail.type_url
            continue
        for violation in bad.field_violations:
            assert violation.description == error.details()
            fields.append(violation.field)
    return Refusal(error.code(), error.details(), fields, responses)


def assert_refused(case, found):
    if case.code is StatusCode.DEADLINE_EXCEEDED and found.code is StatusCode.RESOURCE_EXHAUSTED:
        assert "deadline" in found.message  # a busy machine: the router knows that it is too short
        return
    assert found.code is case.code, (case.name, found)
    assert found.fields == ([case.field] if case.field else []), (case.name, found)
    assert case.says in found.message, (case.name, found)
    if case.code is not StatusCode.DEADLINE_EXCEEDED:
        assert found.responses == 0, (case.name, found)


def generated(stream):
    """Return the token ids by output of a stream that must succeed."""
    outputs, finished = {}, set()
    for response in stream:
        if response.HasField("delta"):
            outputs.setdefault(response.delta.index, []).extend(response.delta.token_ids)
        elif response.HasField("finished"):
            finished.add(response.finished.index)
    assert finished == set(outputs)
    return outputs


def assert_nothing_is_left(router, engine, engine_metrics=None):
    def idle():
        in_engine = engine.metrics(port=engine_metrics)
        states = [("octavo_engine_groups", s) for s in ("running", "waiting", "swapped")]
        states += [("octavo_engine_blocks", "used"), ("octavo_engine_swap_blocks", "used")]
        return all(in_engine.value(name, state=state) == 0 for name, state in states) and all(
            router.metric(f"octavo_router_requests_{name}") == 0 for name in ("in_flight", "queued")
        )

    wait_until(idle, what="router and engine being empty")


@pytest.fixture(scope="module")
def channel(served):
    # The client has no limit of message size: the server must refuse long messages.
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(served.address, options) as channel:
        yield channel


def test_no_failure_touches_another(served, channel):
    request = good(64, sampling=sampling_pb2.SamplingParams(temperature=0))
    alone = generated(call(channel, request))
    assert len(alone[0]) == 64
    stream = call(channel, request)
    begun = [next(stream), next(stream)]
    with ThreadPoolExecutor(8) as threads:
        calls = [
            threads.submit(lambda c=case: refusal(call(channel, c.request, c.method, c.timeout)))
            for case in CASES
        ]
        for case, found in zip(CASES, calls, strict=True):
            assert_refused(case, found.result())
    assert served.metric("octavo_router_requests_in_flight") >= 1, "it ended before the bad ones"
    assert generated([*begun, *stream]) == alone
    assert_nothing_is_left(served, served, served.metrics_port + 1)


def test_the_other_methods_say_it_too(channel):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    tokenize, detokenize = generation_pb2.TokenizeRequest, generation_pb2.DetokenizeRequest
    for method, request, code, field, says in (
        (stub.Tokenize, tokenize(), StatusCode.INVALID_ARGUMENT, "prompt", "must be set"),
        (
            stub.Tokenize,
            tokenize(chat=chat(("wizard", "a"))),
            StatusCode.INVALID_ARGUMENT,
            "chat.messages[0].role",
            ROLES,
        ),
        (stub.Tokenize, tokenize(model="gpt", text="a"), StatusCode.NOT_FOUND, "model", "demo"),
        (
            stub.Detokenize,
            detokenize(token_ids=[5, VOCAB]),
            StatusCode.INVALID_ARGUMENT,
            "token_ids[1]",
            TOKEN_RANGE,
        ),
        (stub.Detokenize, detokenize(model="gpt"), StatusCode.NOT_FOUND, "model", "demo"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            method(request, timeout=60)
        assert_refused(Case("", b"", code, field, says), as_refusal(caught.value))


# An engine with few blocks, and its router.


@pytest.fixture(scope="module")
def small(demo_model, launch_shared):
    engine = launch_shared(
        "engine", "--model", "demo", "--num-blocks", str(FEW_BLOCKS), "--swap-space", "0"
    )
    router = launch_shared("router", "--engine", engine.address)
    engine.wait_ready()  # first: if it fails, its log says why
    return router.wait_ready(), engine


@pytest.fixture(scope="module")
def small_channel(small):
    router, _ = small
    with grpc.insecure_channel(router.address) as channel:
        yield channel


@pytest.fixture
def engine(small):
    """The engine with few blocks; it must end without requests and blocks in use."""
    router, engine = small
    yield engine
    assert_nothing_is_left(router, engine)


def prompt_of(length, max_tokens=None, n=1):
    return generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(token_ids=range(100, 100 + length)),
        sampling=sampling_pb2.SamplingParams(n=n),
        stop=sampling_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=sampling_pb2.OutputOptions(token_ids=True),
    )


@pytest.mark.parametrize(
    ("length", "max_tokens", "n", "field", "says"),
    [
        (128, 1, 1, "prompt", "at most 127 tokens"),
        (40, 1, 8, "prompt", "8 KV-cache blocks of 16 tokens"),
        (40, 26, 3, "stop.max_tokens", "[1, 25]"),
        (64, 18, 4, "stop.max_tokens", "[1, 17]"),
        (120, 9, 1, "stop.max_tokens", "[1, 8]"),
    ],
)
def test_what_could_never_fit_is_refused_at_once(
    small_channel, engine, length, max_tokens, n, field, says
):
    found = refusal(call(small_channel, prompt_of(length, max_tokens, n)))
    assert_refused(Case("", b"", StatusCode.INVALID_ARGUMENT, field, says), found)


@pytest.mark.parametrize(
    ("length", "max_tokens", "n"), [(127, 1, 1), (40, 25, 3), (64, 17, 4), (120, 8, 1)]
)
def test_what_just_fits_is_served(small_channel, engine, length, max_tokens, n):
    outputs = generated(call(small_channel, prompt_of(length, max_tokens, n)))
    assert {i: len(token_ids) for i, token_ids in outputs.items()} == dict.fromkeys(
        range(n), max_tokens
    )


def test_without_max_tokens_outputs_get_what_fits(small_channel, engine):
    outputs = generated(call(small_channel, prompt_of(40, None, 3)))
    assert [len(token_ids) for token_ids in outputs.values()] == [25] * 3


# The engine's own port: the engine trusts no router.


class Session:
    """A router's side of a Session, driven by the test."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self._orders = queue.SimpleQueue()
        orders: Iterator[engine_pb2.SessionRequest] = iter(self._orders.get, None)
        self.call = engine_pb2_grpc.EngineServiceStub(self.channel).Session(orders, timeout=60)
        self.outputs = {}
        self.failures = []
        self.finished = set()

    def send(self, **command):
        self._orders.put(engine_pb2.SessionRequest(**command))

    def end(self):
        """Send that no command follows."""
        self._orders.put(None)

    def submit(self, request_id, **fields):
        self.send(submit=submit(request_id, **fields))

    def read_until(self, condition):
        while not condition():
            response = next(self.call)
            for made in response.outputs:
                self.outputs.setdefault((made.request_id, made.index), []).extend(made.token_ids)
                if made.finish_reason:
                    self.finished.add((made.request_id, made.index))
            self.failures += response.failures

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        self.call.cancel()
        self.channel.close()


def submit(request_id, *, token_ids=(34, 28, 216, 35, 28, 216, 36, 28), max_tokens=40, **fields):
    message = engine_pb2.Submit(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=sampling_pb2.SamplingParams(temperature=0, seed=1),
        stop=sampling_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )
    message.MergeFrom(engine_pb2.Submit(**fields))
    return message


BAD_SUBMITS = [
    (submit("token", token_ids=[5, VOCAB]), 3, "prompt_token_ids[1]", TOKEN_RANGE),
    (submit("empty", token_ids=[]), 3, "prompt", "at least one token"),
    (submit("long", token_ids=[5] * 128), 3, "prompt", "at most 127 tokens"),
    (submit("nan", sampling={"temperature": math.nan}), 3, "sampling.temperature", "[0, 100]"),
    (submit("top_p", sampling={"top_p": 0.0}), 3, "sampling.top_p", "(0, 1]"),
    (submit("n", sampling={"n": OUTPUTS + 1}), 3, "sampling.n", f"[1, {OUTPUTS}]"),
    (submit("n-0", sampling={"n": 0}), 3, "sampling.n", f"[1, {OUTPUTS}]"),
    (submit("blocks", sampling={"n": 9}), 3, "prompt", "8 KV-cache blocks of 16 tokens"),
    (submit("max", max_tokens=0), 3, "stop.max_tokens", "[1, 127]"),
    (submit("logprobs", output={"logprobs": 21}), 3, "output.logprobs", "[0, 20]"),
    (submit("late", timeout={"seconds": -1}), 4, "", "deadline"),
    (submit("beam", beam={"width": OUTPUTS + 1}), 3, "beam.width", f"[1, {OUTPUTS}]"),
    (submit("beams", beam={"width": 9}), 3, "prompt", "8 KV-cache blocks of 16 tokens"),
    (submit("good"), 6, "", "'good' is running"),
]


def test_bad_submits_fail_alone(engine):
    with Session(engine.address) as session:
        session.submit("good", max_tokens=30)
        session.read_until(lambda: session.finished)
        alone = session.outputs.pop(("good", 0))
        session.finished.clear()
        assert len(alone) == 30
        session.submit("good", max_tokens=30)
        session.read_until(lambda: session.outputs)
        for bad, *_ in BAD_SUBMITS:
            session.send(submit=bad)
        session.send(abort=engine_pb2.Abort(request_id="never submitted"))
        session.send(abort=engine_pb2.Abort(request_id="good", index=7))
        session.send()  # no command at all
        session.read_until(lambda: len(session.failures) == len(BAD_SUBMITS))
        assert not session.finished, "the good one ended before the bad ones"
        session.read_until(lambda: session.finished)
        assert session.outputs == {("good", 0): alone}
    failures = {failure.request_id: failure for failure in session.failures}
    for bad, code, field, says in BAD_SUBMITS:
        failure = failures[bad.request_id]
        assert (failure.code, failure.field) == (code, field), failure
        assert says in failure.message, failure


def test_an_absurd_timeout_is_no_deadline(engine):
    with Session(engine.address) as session:
        session.submit("a", max_tokens=3, timeout={"seconds": 2**62})
        session.submit("b", max_tokens=3)
        session.read_until(lambda: len(session.finished) == 2)
    assert not session.failures


@pytest.mark.parametrize("way", ["cancel", "close", "end", "unread"])
def test_a_session_that_is_cut_leaves_nothing(engine, way):
    with Session(engine.address) as session:
        for i in range(12):  # more than fit in the blocks: some run, some wait
            session.submit(str(i), max_tokens=90, sampling={"n": 1 + i % 2})
        if way == "unread":
            wait_until(lambda: engine.metric("octavo_engine_blocks", state="used") > 0)
            time.sleep(0.3)
        else:
            session.read_until(lambda: session.outputs)
        wait_until(lambda: engine.metric("octavo_engine_groups", state="waiting") > 0)
        if way == "close":
            session.channel.close()
        elif way == "end":
            session.end()
            with pytest.raises(StopIteration):
                session.read_until(lambda: False)
        else:
            session.call.cancel()
        wait_until(lambda: engine.metric("octavo_engine_groups") == 0, what="no request left")


def test_a_session_of_garbage_ends_alone(engine):
    with Session(engine.address) as session:
        session.submit("good", max_tokens=30)
        session.read_until(lambda: session.outputs)
        orders = [engine_pb2.SessionRequest(submit=submit("doomed", max_tokens=90))]
        raw = [*(order.SerializeToString() for order in orders), b"\xff\xff\xff"]
        found = refusal(session.channel.stream_stream(SESSION)(iter(raw), timeout=60))
        assert found.code is StatusCode.INVALID_ARGUMENT
        assert "not a valid protobuf SessionRequest" in found.message
        session.read_until(lambda: session.finished)
        assert len(session.outputs["good", 0]) == 30
    assert not session.failures
