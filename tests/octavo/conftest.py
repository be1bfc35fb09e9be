"""A service on loopback that answers as tests set it, and records requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.common.tls import Tls, server_credentials
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc
from octavo.v1 import sampling_pb2


class FakeService(pb_grpc.GenerationServiceServicer):
    """Echoes the last message, one word per delta, or sends `deltas`; fails or hangs on demand."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[str | bytes | None] = []
        self.failure: status_pb2.Status | None = None
        self.listing_fails = True
        self.deltas: list[pb.Delta] = []
        self.reason = sampling_pb2.FINISH_REASON_STOP_STRING
        self.endless = False
        self.cancelled: list[bool] = []
        self.models: list[pb.ModelCard] = []

    def fail(self, code: grpc.StatusCode, message: str, *details, listing: bool = True) -> None:
        """Make every later call fail; without `listing`, ListModels still works."""
        self.listing_fails = listing
        self.failure = status_pb2.Status(code=code.value[0], message=message)
        for detail in details:
            self.failure.details.add().Pack(detail)

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self._note_key(context)
        context.add_callback(lambda: self.cancelled.append(True))
        yield pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=request.request_id or "made", model="m", prompt_tokens=3
            )
        )
        prompt = request.text or (request.chat.messages or [pb.ChatMessage()])[-1].content
        words = [f"{word} " for word in prompt.split()]
        while self.endless and context.is_active():
            yield pb.GenerateResponse(delta=pb.Delta(text="on and "))
        yield from (pb.GenerateResponse(delta=delta) for delta in self.deltas)
        for index in range(0 if self.deltas else request.sampling.n or 1):
            for number, word in enumerate(words):
                logprob = sampling_pb2.TokenLogprob(token_id=number, logprob=-0.5)
                logprob.top.add(token_id=number, logprob=-0.5)
                delta = pb.Delta(index=index, text=word, token_ids=[number], logprobs=[logprob])
                yield pb.GenerateResponse(delta=delta)
        self._maybe_fail(context)
        for index in range(request.sampling.n or 1):
            yield pb.GenerateResponse(
                finished=pb.Finished(
                    index=index,
                    reason=self.reason,
                    stop_string="END",
                    usage=pb.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=len(words)),
                )
            )

    def Tokenize(self, request, context):  # noqa: N802
        self._maybe_fail(context)
        return pb.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])

    def Detokenize(self, request, context):  # noqa: N802
        self._maybe_fail(context)
        return pb.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    def ListModels(self, request, context):  # noqa: N802
        self._note_key(context)
        if self.listing_fails:
            self._maybe_fail(context)
        return pb.ListModelsResponse(models=self.models)

    def _note_key(self, context) -> None:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))

    def _maybe_fail(self, context) -> None:
        if self.failure is not None:
            context.abort_with_status(rpc_status.to_status(self.failure))


@pytest.fixture
def service() -> Iterator[FakeService]:
    """The service; it listens at its `address`."""
    yield from serve(None)


@pytest.fixture
def secure_service(authority) -> Iterator[FakeService]:
    """The service over TLS, for clients with a certificate."""
    files = authority.issue("server", "dns:server.example")
    yield from serve(server_credentials(Tls(authority.ca, *files)))


def serve(credentials: grpc.ServerCredentials | None) -> Iterator[FakeService]:
    server = grpc.server(ThreadPoolExecutor(8))
    fake = FakeService()
    fake.models.append(
        pb.ModelCard(
            name="m",
            engines=1,
            vocab_size=1000,
            block_size=16,
            total_blocks=10,
            free_blocks=4,
            cached_blocks=3,
            shared_blocks=2,
            wasted_slots=12,
            total_swap_blocks=8,
            used_swap_blocks=5,
        )
    )
    pb_grpc.add_GenerationServiceServicer_to_server(fake, server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    fake.address = f"127.0.0.1:{port}"
    server.start()
    yield fake
    server.stop(0).wait()


@pytest.fixture
def bad_request() -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop", description="too many")
    return error_details_pb2.BadRequest(field_violations=[violation])


@pytest.fixture
def retry_info() -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(1500)
    return info
