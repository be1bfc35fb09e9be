"""The door's own way to the router: gRPC on a Unix socket that nobody else can reach."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import grpc
import grpc.aio

from octavo.client import AsyncStream, GenerateOptions, Prompt
from octavo.client.errors import from_rpc_error
from octavo.client.requests import generate_request, tokenize_request
from octavo.common import rpc
from octavo.v1 import generation_pb2, generation_pb2_grpc

Metadata = tuple[tuple[str, str], ...]

CLOSE_SECONDS = 1.0
"""What calls have to end when the link closes."""
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


class Link:
    """A gRPC server of the router's services for the door alone, and the door's calls to it.

    It is a server of its own, and not one more address of the clients' server,
    as limits on a peer's connections and calls are not for the one peer that
    speaks for many. Its socket lies in a directory of mode 0700.

    Args:
        services: As `rpc.create_server` takes them.
        guard: Who may call what, as `rpc.create_server` takes it.
        max_message_bytes: Longest message that the door may send.
    """

    def __init__(
        self,
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
        *,
        guard: rpc.Guard,
        max_message_bytes: int,
    ) -> None:
        self._services = services
        self._guard = guard
        self._max_message_bytes = max_message_bytes
        self._open = ExitStack()
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Listens and connects."""
        directory = self._open.enter_context(TemporaryDirectory(prefix="octavo-"))
        address = f"unix:{Path(directory, 'router.sock')}"
        self._server, _ = await rpc.create_server(
            self._services,
            max_message_bytes=self._max_message_bytes,
            guard=self._guard,
        )
        self._server.add_insecure_port(address)
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._stub = cast("generation_pb2_grpc.GenerationServiceAsyncStub", stub)

    async def ended(self) -> None:
        """Wait until the server has stopped; raise what it crashed with."""
        if self._server is not None:
            await rpc.until_terminated(self._server)

    async def stop(self) -> None:
        """Ends what is left of calls, and removes the socket."""
        if self._channel is not None:
            await self._channel.close()
        if self._server is not None:
            await self._server.stop(CLOSE_SECONDS)
        self._open.close()

    def generate(
        self, prompt: Prompt, options: GenerateOptions, metadata: Metadata, timeout: float | None
    ) -> AsyncStream:
        """Starts a request; errors come up when its stream is read.

        Raises:
            InvalidArgumentError: An option does not fit its type.
        """
        request = generate_request(prompt, options)
        return AsyncStream(self._stub.Generate(request, timeout=timeout, metadata=metadata))

    async def tokenize(
        self, prompt: Prompt, model: str, metadata: Metadata
    ) -> generation_pb2.TokenizeResponse:
        """Returns the tokens of text or a chat.

        Raises:
            Error: The call failed.
        """
        try:
            return await self._stub.Tokenize(tokenize_request(prompt, model), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def list_models(self, metadata: Metadata) -> list[generation_pb2.ModelCard]:
        """Returns the models that are served now.

        Raises:
            Error: The call failed.
        """
        try:
            response = await self._stub.ListModels(
                generation_pb2.ListModelsRequest(), metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return list(response.models)
