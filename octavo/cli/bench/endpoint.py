"""What the load generator sends requests to: Octavo over gRPC, or any server with OpenAI's API."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from octavo.cli.bench.workload import BenchRequest, ServedModel
from octavo.client import Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """A message with tokens.

    Attributes:
        tokens: how many; None if the server does not say.
    """

    tokens: int | None


class RequestError(Exception):
    """A request failed.

    Attributes:
        code: name of the failure; requests that failed are counted by it.
        message: what the server or the connection said.
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
            octavo.client.Error, typer.Exit: the server has no such model or does not answer.
        """

    def stream(
        self, request: BenchRequest, *, model: str, salt: str, timeout: float | None
    ) -> AsyncIterator[Piece | Usage]:
        """Send a request; yield its messages with tokens, then how many tokens it had.

        Args:
            request: the prompt, and how many tokens to generate.
            model: name of the model.
            salt: requests with different salts share nothing in a prefix cache.
            timeout: deadline in seconds.

        Raises:
            RequestError: it failed.
        """


Connection = AbstractAsyncContextManager[Endpoint]
"""An endpoint that is open while it is entered."""
