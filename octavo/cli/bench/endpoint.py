"""The measured server: Octavo over gRPC, or any server with OpenAI's API."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from octavo.cli.bench.workload import BenchRequest, ServedModel
from octavo.client import Usage


@dataclass(frozen=True, slots=True)
class TokenMessage:
    """A message with tokens.

    Attributes:
        tokens: Number of tokens; None if the server does not say.
    """

    tokens: int | None


class RequestError(Exception):
    """A request failed.

    Attributes:
        code: Name of the failure, by which failed requests are counted.
        message: Message of the server or the connection.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Endpoint(Protocol):
    """A connection to a server."""

    async def find_model(self, name: str | None) -> ServedModel:
        """Return the model of that name, or the first one for None.

        Raises:
            octavo.client.Error, typer.Exit: The server has no such model or does not answer.
        """

    def stream(
        self, request: BenchRequest, *, model: str, salt: str, timeout: float | None
    ) -> AsyncIterator[TokenMessage | Usage]:
        """Send a request; yield its messages with tokens, then the usage.

        Args:
            request: The prompt, and the number of tokens to generate.
            model: Name of the model.
            salt: Prefix-cache salt: requests with different salts share no cached blocks.
            timeout: Deadline in seconds.

        Raises:
            RequestError: The request failed.
        """


Connection = AbstractAsyncContextManager[Endpoint]
"""A context that opens an endpoint, and closes it at the end."""
