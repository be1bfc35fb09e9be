"""What the load generator sends requests to: Octavo over gRPC, or any server with OpenAI's API."""

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
        code: Name of the failure; requests that failed are counted by it.
        message: Message of the server or of the connection.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Endpoint(Protocol):
    """A connection to a server."""

    async def find_model(self, name: str | None) -> ServedModel:
        """Return the model of that name, the first one for None.

        Raises:
            octavo.client.Error, typer.Exit: The server has no such model or does not answer.
        """

    def stream(
        self, request: BenchRequest, *, model: str, salt: str, timeout: float | None
    ) -> AsyncIterator[TokenMessage | Usage]:
        """Send a request; yield its messages with tokens, then how many tokens it had.

        Args:
            request: The prompt, and how many tokens to generate.
            model: Name of the model.
            salt: Requests with different salts share nothing in a prefix cache.
            timeout: Deadline in seconds.

        Raises:
            RequestError: It failed.
        """


Connection = AbstractAsyncContextManager[Endpoint]
"""An endpoint that is open while it is entered."""
