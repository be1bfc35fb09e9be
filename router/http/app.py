"""The routes."""

import functools
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from octavo.client import Error
from octavo.common import rpc
from octavo.router.http import headers, tokens
from octavo.router.http.answers import Answer, Vocabularies
from octavo.router.http.body import ClientLeftError, M, parse, while_connected
from octavo.router.http.chat import ChatLayout
from octavo.router.http.completions import CompletionLayout
from octavo.router.http.errors import ApiError, from_client
from octavo.router.http.loopback_client import Link
from octavo.router.http.peer_limit import PeerLimit
from octavo.router.http.schema import ChatRequest, CompletionRequest
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Gate
from octavo.v1 import generation_pb2

PLAYGROUND = Path(__file__).parent / "playground"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """What the routes lead to.

    Args:
        settings: Limits and allowed origins.
        link: The router, as its clients know it.
        gate: Who may use the router.
        vocabularies: Models' vocabularies.
        status: What GET /status says to those who may use certain models.
        is_serving: Whether there is an engine to serve with.
    """

    def __init__(
        self,
        settings: RouterSettings,
        link: Link,
        *,
        gate: Gate,
        vocabularies: Vocabularies,
        status: Callable[[Collection[str]], dict[str, Any]],
        is_serving: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._link = link
        self._gate = gate
        self._vocabularies = vocabularies
        self._status = status
        self._is_serving = is_serving
        self._created = int(time.time())

    def app(self) -> Starlette:
        """Returns the application."""
        middleware = []
        if self._settings.http_cors_origin:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._settings.http_cors_origin,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["X-Request-Id", "Retry-After", "Retry-After-Ms"],
                )
            )
        if self._settings.max_calls_per_peer:
            middleware.append(Middleware(PeerLimit, most=self._settings.max_calls_per_peer))
        return Starlette(
            routes=[
                Route("/v1/chat/completions", _answered(self._chat), methods=["POST"]),
                Route("/v1/completions", _answered(self._completions), methods=["POST"]),
                Route("/v1/models", _answered(self._models)),
                Route("/v1/models/{model:path}", _answered(self._model)),
                Route("/tokenize", _answered(self._tokenize), methods=["POST"]),
                Route("/status", _answered(self._get_status)),
                Route("/health", self._health),
                Route("/", _page),
                Route("/playground/{name}", _page),
            ],
            middleware=middleware,
            exception_handlers={HTTPException: _not_there, Exception: _broken},
        )

    async def _chat(self, request: Request) -> Response:
        body = await self._parse(request, ChatRequest)
        layout = ChatLayout(logprobs=bool(body.logprobs))
        return await self._answer(request, body, layout)

    async def _completions(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)
        layout = CompletionLayout(logprobs=body.logprobs is not None)
        return await self._answer(request, body, layout)

    async def _parse(self, request: Request, model: type[M]) -> M:
        """Reads the body of one who may use the router; nobody else's is looked at."""
        authorization = dict(headers.metadata(request)).get("authorization")
        try:
            self._gate.admit(authorization)
        except rpc.RpcError as error:
            raise Error(error.code, error.message) from None
        request.state.known = True
        return await parse(request, model, self._settings.max_message_bytes)

    async def _answer(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        layout: ChatLayout | CompletionLayout,
    ) -> Response:
        answer = Answer(body, layout, self._vocabularies)
        try:
            answer.start(self._link, headers.metadata(request), headers.timeout(request))
            if body.stream:
                await while_connected(request, answer.begin())
                return EventStream(answer)
            whole = await while_connected(request, answer.whole())
        except BaseException:
            answer.close()
            raise
        return JSONResponse(whole, headers={"X-Request-Id": answer.id})

    async def _tokenize(self, request: Request) -> Response:
        body = await self._parse(request, tokens.TokenizeRequest)
        metadata = headers.metadata(request)
        made = await self._link.tokenize(body.text_or_chat, body.model, metadata)
        return JSONResponse(tokens.answer(made))

    async def _models(self, request: Request) -> Response:
        cards = await self._link.list_models(headers.metadata(request))
        return JSONResponse({"object": "list", "data": [self._card(card) for card in cards]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        for card in await self._link.list_models(headers.metadata(request)):
            if card.name == name:
                return JSONResponse(self._card(card))
        raise ApiError(
            404, f"model {name[:128]!r} is not served", param="model", code="model_not_found"
        )

    async def _get_status(self, request: Request) -> Response:
        cards = await self._link.list_models(headers.metadata(request))
        usable = {card.name for card in cards}
        return JSONResponse(self._status(usable), headers={"Cache-Control": "no-store"})

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        serving = self._is_serving()
        status = "serving" if serving else "not serving"
        return JSONResponse({"status": status}, 200 if serving else 503)

    def _card(self, card: generation_pb2.ModelCard) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": card.max_model_len,
        }


class EventStream(StreamingResponse):
    """An answer as it is made. When the client leaves, its calls are cancelled."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        super().__init__(
            answer.chunks(),
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # else nginx gathers what should flow
                "X-Request-Id": answer.id,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        async with self._answer:
            await super().__call__(scope, receive, send)


def _answered(endpoint: Endpoint) -> Endpoint:
    """Turns what an endpoint raises into the response that says so."""

    @functools.wraps(endpoint)
    async def call(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except ApiError as error:
            return error.response()
        except Error as error:
            return from_client(error).response()
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it
        request.state.known = True  # to the connection: the caller's key is valid
        return response

    return call


async def _page(request: Request) -> Response:
    """Serves the playground's files: index.html, and by name what it refers to."""
    name = request.path_params.get("name", "index.html")
    if name not in {path.name for path in PLAYGROUND.iterdir()}:
        raise HTTPException(404)
    return FileResponse(PLAYGROUND / name, headers=PAGE_HEADERS)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:256]}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _broken(request: Request, error: Exception) -> Response:  # noqa: ARG001 - it is logged
    message = "an unexpected error; the server's log has the details"
    return ApiError(500, message, kind="server_error").response()
