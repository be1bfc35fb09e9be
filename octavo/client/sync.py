"""The synchronous client."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1 import health_pb2

from octavo.client import requests, responses
from octavo.client.channel import DEFAULT_ADDRESS, HEALTH_CHECK, Metadata, secure, with_key
from octavo.client.errors import from_rpc_error
from octavo.client.requests import Prompt
from octavo.client.types import Accepted, Completion, Delta, Event, Finished, Model
from octavo.common.sampling_parameters import GenerateOptions
from octavo.common.tls import Tls
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc


class Stream:
    """The answer to one request as it is made. Read it once.

    Iterate it for the pieces of text, or `events()` for all that is said, or
    take the whole with `text()` or `complete()`. Leaving the loop, `close()`
    and the end of a `with` block cancel the call: the server stops at once.
    """

    def __init__(self, call: "grpc._CallIterator[pb.GenerateResponse]") -> None:
        self._call = call
        self._gathering = responses.Gathering()

    @property
    def accepted(self) -> Accepted | None:
        """What the server said on admission, once it has been read."""
        return self._gathering.accepted

    @property
    def finished(self) -> tuple[Finished, ...]:
        """How outputs ended, as far as has been read."""
        return tuple(self._gathering.finished.values())

    def events(self) -> Iterator[Event]:
        """Yields every event.

        Raises:
            Error: the request failed.
        """
        try:
            for response in self._call:
                event = responses.event(response)
                if event is not None:
                    self._gathering.add(event)
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self.close()

    def __iter__(self) -> Iterator[Delta]:
        """Yields the pieces of text."""
        return (event for event in self.events() if isinstance(event, Delta))

    def complete(self) -> Completion:
        """Waits for the end and returns everything.

        Raises:
            Error: the request failed.
        """
        for _ in self.events():
            pass
        return self._gathering.result()

    def text(self) -> str:
        """Waits for the end and returns the first output's text.

        Raises:
            Error: the request failed.
        """
        return self.complete().text

    def close(self) -> None:
        """Cancels the call if it is still running."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """Talks to an Octavo router. Safe to share between threads.

    Args:
        address: "host:port".
        api_key: says who asks, where the server wants to know.
        tls: files for TLS, `Tls()` for public authorities; without, the connection is plain.
        credentials: instead of `tls`, where files are not enough.
        metadata: sent with every call.

    Raises:
        TlsError: the files cannot be used.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        self.address = address
        self._metadata = with_key(metadata, api_key)
        credentials, options = secure(tls, credentials)
        self._channel = (
            grpc.secure_channel(address, credentials, options=options)
            if credentials
            else grpc.insecure_channel(address, options=options)
        )
        self._stub = pb_grpc.GenerationServiceStub(self._channel)
        self._health = self._channel.unary_unary(
            HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Starts a request; errors come up when its stream is read.

        Args:
            prompt: text, messages or token ids.
            timeout: seconds until the server gives up the request.
            **options: see GenerateOptions.

        Raises:
            InvalidArgumentError: an option does not fit its type.
        """
        request = requests.generate_request(prompt, options)
        return Stream(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def tokenize(
        self, prompt: Prompt, *, model: str | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Returns the tokens that `generate` would use for text or a chat.

        Raises:
            Error: the request failed.
        """
        request = requests.tokenize_request(prompt, model)
        try:
            response = self._stub.Tokenize(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return tuple(response.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Returns the text of tokens.

        Raises:
            Error: the request failed.
        """
        request = requests.detokenize_request(token_ids, model, keep_special_tokens)
        try:
            response = self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return response.text

    def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Returns the models served now, with their limits and load.

        Raises:
            Error: the request failed.
        """
        request = pb.ListModelsRequest()
        try:
            response = self._stub.ListModels(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return responses.models(response)

    def is_serving(self, *, timeout: float | None = 5.0) -> bool:
        """Says whether the server is ready for requests; False if it cannot be reached."""
        try:
            response = self._health(
                health_pb2.HealthCheckRequest(), timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Closes the connection and cancels what still runs on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
