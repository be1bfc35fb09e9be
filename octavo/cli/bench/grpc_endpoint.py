"""Requests to Octavo over gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from octavo.cli.bench.endpoint import RequestError, TokenMessage
from octavo.cli.bench.workload import BenchRequest, ServedModel
from octavo.cli.connection import Server
from octavo.cli.output import fail
from octavo.client import (
    AsyncClient,
    Delta,
    Error,
    Finished,
    GenerateOptions,
    NotFoundError,
    UnavailableError,
    Usage,
)
from octavo.common.sampling_parameters import NEUTRAL

LOOKUP_SECONDS = 30.0

OPTIONS: GenerateOptions = {**NEUTRAL, "temperature": 0}
"""Greedy sampling that overrides models' defaults, to make results comparable."""


@asynccontextmanager
async def connect(server: Server) -> AsyncIterator["GrpcEndpoint"]:
    """Connect to a router; disconnect at the end."""
    async with server.async_client() as client:
        yield GrpcEndpoint(client, server.address)


class GrpcEndpoint:
    """A router's gRPC port. See `Endpoint`.

    Args:
        client: Connected to the router.
        address: The router's address, for messages.
    """

    def __init__(self, client: AsyncClient, address: str = "") -> None:
        self._client = client
        self._address = address

    async def find_model(self, name: str | None) -> ServedModel:
        """Return the named model, else the first.

        Raises:
            typer.Exit: No server answers.
            NotFoundError: The model is not served.
        """
        try:
            models = await self._client.list_models(timeout=LOOKUP_SECONDS)
        except UnavailableError as error:
            if "failed to connect" not in error.message:
                raise
            raise fail(
                f"nothing answers at {self._address}: start a server with `octavo serve`, "
                "name one with --address, or let bench start one with --serve demo"
            ) from None
        for model in models:
            if name in (None, model.name, *model.aliases):
                return ServedModel(model.name, model.max_model_len or None, model.vocab_size)
        served = ", ".join(model.name for model in models) or "none"
        raise NotFoundError(
            grpc.StatusCode.NOT_FOUND,
            f"no model {name!r}; served: {served}" if name else "no model is served yet",
        )

    async def stream(
        self, request: BenchRequest, *, model: str, salt: str, timeout: float | None
    ) -> AsyncIterator[TokenMessage | Usage]:
        """Send a request; yield its messages with tokens, then each output's usage.

        Raises:
            RequestError: The request failed; the code is the gRPC status.
        """
        options: GenerateOptions = {
            **OPTIONS,
            "model": model,
            "cache_salt": salt,
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "token_ids": True,
        }
        try:
            stream = self._client.generate(request.prompt, timeout=timeout, **options)
            async for event in stream.events():
                if isinstance(event, Delta) and event.token_ids:
                    yield TokenMessage(len(event.token_ids))
                elif isinstance(event, Finished):
                    yield event.usage
        except Error as error:
            raise RequestError(error.code.name, error.message) from None
