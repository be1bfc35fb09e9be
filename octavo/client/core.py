"""Everything that the synchronous and the asyncio client share: all except waiting."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2_grpc

from octavo.client import requests, responses
from octavo.client.address import DEFAULT_ADDRESS, parse_address
from octavo.client.channel import Metadata, locate, secure, with_key
from octavo.client.prompts import Prompt
from octavo.client.types import Accepted, Event, Finished, Output
from octavo.common.sampling_parameters import GenerateOptions
from octavo.common.tls import Tls
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc


class Cancellable(Protocol):
    """A call that can be cancelled."""

    def cancel(self) -> Any:  # noqa: ANN401 - grpc's two kinds of calls differ
        """Cancel the call if it is running."""


class BaseStream:
    """The events of one request that were read so far."""

    def __init__(self, call: Cancellable) -> None:
        self._cancellable = call
        self._gathering = responses.Gathering()

    @property
    def accepted(self) -> Accepted | None:
        """Server's message on admission; None until it was read."""
        return self._gathering.accepted

    @property
    def finished(self) -> tuple[Finished, ...]:
        """Finished outputs that were read so far."""
        return tuple(self._gathering.finished.values())

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Finished outputs that were read so far."""
        return self._gathering.result().outputs

    def close(self) -> None:
        """Cancel the call if it is running."""
        self._cancellable.cancel()

    def _decode(self, response: pb.GenerateResponse) -> Event | None:
        event = responses.event(response)
        if event is not None:
            self._gathering.add(event)
        return event


S = TypeVar("S", bound=BaseStream)


class BaseClient(Generic[S]):
    """A connection to a router.

    Args:
        address: "host:port", "host" (port 50051) or ":port" (localhost), also after http:// or,
            for TLS, https://; or a gRPC target such as "unix:/path".
        api_key: The tenant's API key; None if the server needs none.
        tls: Certificate files; `Tls()` uses the public authorities. None: plaintext.
        credentials: Credentials of gRPC, instead of `tls`, if files do not suffice.
        metadata: Metadata to send with every call.

    Raises:
        TlsError: The files cannot be used.
        ValueError: The address is malformed.
    """

    _insecure_channel: Callable[..., Any]
    _secure_channel: Callable[..., Any]
    _make_stream: Callable[[Any], S]

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        if credentials is None:
            address, tls = locate(address, tls)
        else:
            address, _ = parse_address(address)
        self.address = address
        self._metadata = with_key(metadata, api_key)
        credentials, options = secure(address, tls, credentials)
        self._channel = (
            self._secure_channel(address, credentials, options=options)
            if credentials
            else self._insecure_channel(address, options=options)
        )
        self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> S:
        """Start a request; errors are raised when the stream is read.

        Args:
            prompt: Text, messages or token ids.
            timeout: Deadline in seconds.
            **options: See GenerateOptions.

        Raises:
            InvalidArgumentError: An option has the wrong type.
        """
        request = requests.generate_request(prompt, options)
        return self._make_stream(
            self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        )
