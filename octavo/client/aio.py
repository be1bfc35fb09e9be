"""The asyncio client: `Client` with await."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from octavo.client import requests, responses
from octavo.client.channel import DEFAULT_ADDRESS, HEALTH_CHECK, Metadata, secure, with_key
from octavo.client.errors import CancelledError, from_rpc_error
from octavo.client.requests import Prompt
from octavo.client.types import Accepted, Completion, Delta, Event, Finished, Model
from octavo.common.sampling_parameters import GenerateOptions
from octavo.common.tls import Tls
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class AsyncStream:
    """The answer to one request as it is made. Read it once.

    As `Stream`. After `break`, the event loop cancels the call as soon as it
    gets to run; `async with` or `close()` do so at once.
    """

    def __init__(self, call: "Call") -> None:
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

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields every event.

        Raises:
            Error: the request failed.
        """
        try:
            async for response in self._call:
                event = responses.event(response)
                if event is not None:
                    self._gathering.add(event)
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The call was closed, not the task that reads it.
            raise CancelledError(grpc.StatusCode.CANCELLED, "the stream was closed") from None
        finally:
            self.close()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        """Yields the pieces of text."""
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def complete(self) -> Completion:
        """Waits for the end and returns everything.

        Raises:
            Error: the request failed.
        """
        async for _ in self.events():
            pass
        return self._gathering.result()

    async def text(self) -> str:
        """Waits for the end and returns the first output's text.

        Raises:
            Error: the request failed.
        """
        return (await self.complete()).text

    def close(self) -> None:
        """Cancels the call if it is still running."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to an Octavo router from one event loop. Make it inside the loop.

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
            grpc.aio.secure_channel(address, credentials, options=options)
            if credentials
            else grpc.aio.insecure_channel(address, options=options)
        )
        # The stubs' types tell the two apart; at run time there is one class.
        stub = pb_grpc.GenerationServiceStub(self._channel)
        self._stub = cast("pb_grpc.GenerationServiceAsyncStub", stub)
        self._health = self._channel.unary_unary(
            HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Starts a request; errors come up when its stream is read.

        Args:
            prompt: text, messages or token ids.
            timeout: seconds until the server gives up the request.
            **options: see GenerateOptions.

        Raises:
            InvalidArgumentError: an option does not fit its type.
        """
        request = requests.generate_request(prompt, options)
        return AsyncStream(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    async def tokenize(
        self, prompt: Prompt, *, model: str | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Returns the tokens that `generate` would use for text or a chat.

        Raises:
            Error: the request failed.
        """
        request = requests.tokenize_request(prompt, model)
        try:
            response = await self._stub.Tokenize(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return tuple(response.token_ids)

    async def detokenize(
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
            response = await self._stub.Detokenize(
                request, timeout=timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return response.text

    async def list_models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """Returns the models served now, with their limits and load.

        Raises:
            Error: the request failed.
        """
        try:
            response = await self._stub.ListModels(
                pb.ListModelsRequest(), timeout=timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return responses.models(response)

    async def is_serving(self, *, timeout: float | None = 5.0) -> bool:
        """Says whether the server is ready for requests; False if it cannot be reached."""
        try:
            response = await self._health(
                health_pb2.HealthCheckRequest(), timeout=timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Closes the connection and cancels what still runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
