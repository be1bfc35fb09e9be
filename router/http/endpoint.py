"""The types of an API's endpoints, and of what the application gives them."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.router.http.body import M
from octavo.router.http.calls import Calls, GeneratingBody
from octavo.router.tenants.tenant import Tenant

Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request."""
Authenticate = Callable[[Request], Tenant]
"""Returns a request's tenant."""
Answer = Callable[[Request, Tenant, GeneratingBody, Calls], Awaitable[Response]]
"""Generates an answer, and sends it whole or streamed."""


class Parse(Protocol):
    """Authenticate a request and read its body."""

    def __call__(self, request: Request, model: type[M]) -> Awaitable[tuple[Tenant, M]]: ...  # noqa: D102
