"""The HTTP routes: add new ones here."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast
from urllib.parse import quote

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from octavo.client import InvalidArgumentError
from octavo.common import rpc
from octavo.common.version import own_version
from octavo.router.generate import Generator
from octavo.router.http import headers, tokens
from octavo.router.http.answer_format import AnswerFormat
from octavo.router.http.answers import Answer, Vocabularies
from octavo.router.http.anthropic.answer import MessageAnswer
from octavo.router.http.anthropic.schema import CountRequest, MessagesRequest
from octavo.router.http.batches.endpoints import BatchEndpoints, batches_are_off
from octavo.router.http.batches.runner import BatchRunner
from octavo.router.http.batches.storage import BatchStorage
from octavo.router.http.bodies import OpenBody
from octavo.router.http.body import ClientLeftError, M, parse, while_connected
from octavo.router.http.calls import Calls, GeneratingBody
from octavo.router.http.chat import ChatFormat
from octavo.router.http.completions import CompletionFormat
from octavo.router.http.embeddings import EmbeddingsRequest, EmbedRequest
from octavo.router.http.endpoint import Handler
from octavo.router.http.errors import ApiError, from_client, from_rpc, speaks_anthropic
from octavo.router.http.event_stream import EventStream
from octavo.router.http.model_cards import (
    anthropic_card,
    anthropic_list,
    openai_card,
    openai_list,
)
from octavo.router.http.ollama.endpoints import OllamaEndpoints
from octavo.router.http.page import page
from octavo.router.http.peer_limit import HttpPeerLimit
from octavo.router.http.responses.endpoints import ResponseEndpoints
from octavo.router.http.responses.store import ResponseStore
from octavo.router.http.schema import ChatRequest, CompletionRequest
from octavo.router.http.scores import ClassifyRequest, RerankRequest, ScoreRequest
from octavo.router.http.stats import RouterStats
from octavo.router.http.texts import TextsBody
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.tenants.tenant import Tenant
from octavo.v1 import generation_pb2

Serve = Callable[..., Coroutine[Any, Any, Any]]
"""One of the embedder's methods."""

IGNORED = "X-Ignored-Arguments"
"""Header with the names of ignored body members."""
UNENFORCED = "X-Unenforced-Schema"
"""Header with the parts of schemas that are not enforced, percent-encoded."""
MAX_UNENFORCED = 1_000
"""Maximum characters of that header; the response body lists all parts."""
METHODS = ("GET", "POST", "DELETE")


class Api:
    """The HTTP endpoints.

    Args:
        settings: Limits and allowed origins.
        generator: Serves the requests.
        authenticator: Identifies tenants by their API keys.
        vocabularies: Models' vocabularies.
        is_serving: Whether an engine is available.
        stats: Content of GET /status and GET /metrics.
        store: The responses that later requests may continue.
        batches: The files and batches; None: they are off.
    """

    def __init__(
        self,
        settings: RouterSettings,
        generator: Generator,
        *,
        authenticator: Authenticator,
        vocabularies: Vocabularies,
        is_serving: Callable[[], bool],
        stats: RouterStats,
        store: ResponseStore,
        batches: BatchStorage | None,
    ) -> None:
        self._settings = settings
        self._generator = generator
        self._authenticator = authenticator
        self._vocabularies = vocabularies
        self._is_serving = is_serving
        self._stats = stats
        self._responses = ResponseEndpoints(
            store,
            generator,
            vocabularies,
            parse=self._parse,
            authenticate=self._authenticate,
            answer=self._answer,
        )
        self.runner: BatchRunner | None = None
        self._batch_routes: list[BaseRoute] = [
            Route(f"/v1/{name}{{_:path}}", _answered(batches_are_off), methods=list(METHODS))
            for name in ("files", "batches")
        ]
        if batches is not None:
            app = headers.RequestIds(
                Starlette(routes=self._generating_routes(), exception_handlers=ERRORS)
            )
            self.runner = BatchRunner(batches, app, authenticator.find, settings.batch_in_flight)
            endpoints = BatchEndpoints(
                batches, self.runner, parse=self._parse, authenticate=self._authenticate
            )
            self._batch_routes = endpoints.routes(_answered)
        self._refusing = False
        self._created = int(time.time())

    def app(self) -> Starlette:
        """Return the application."""
        middleware = []
        if self._settings.http_cors_origin:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._settings.http_cors_origin,
                    allow_methods=METHODS,
                    allow_headers=["*"],
                    expose_headers=[
                        *(headers.REQUEST_ID, "Retry-After", "Retry-After-Ms"),
                        *(IGNORED, UNENFORCED),
                    ],
                )
            )
        if self._settings.max_calls_per_peer:
            middleware.append(Middleware(HttpPeerLimit, limit=self._settings.max_calls_per_peer))
        root = self._settings.http_root_path
        routes = self._routes()
        return Starlette(
            routes=[*routes, Mount(root, routes=routes)] if root else routes,
            middleware=middleware,
            exception_handlers=ERRORS,
        )

    def _routes(self) -> list[BaseRoute]:
        return [
            *self._generating_routes(),
            *self._batch_routes,
            Route("/v1/messages", _answered(self._messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", _answered(self._count_tokens), methods=["POST"]),
            *self._response_routes(),
            *self._ollama_routes(),
            *self._text_routes(),
            Route("/v1/models", _answered(self._models)),
            Route("/v1/models/{model:path}", _answered(self._model)),
            Route("/tokenize", _answered(self._tokenize), methods=["POST"]),
            Route("/detokenize", _answered(self._detokenize), methods=["POST"]),
            Route("/status", _answered(self._get_status)),
            Route("/metrics", _answered(self._metrics)),
            Route("/version", _answered(self._version)),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/", page),
            Route("/playground/{name:path}", page),
        ]

    def _generating_routes(self) -> list[BaseRoute]:
        """Return the routes of requests that may be in batches."""
        return [
            Route("/v1/chat/completions", _answered(self._chat), methods=["POST"]),
            Route("/v1/completions", _answered(self._completions), methods=["POST"]),
            Route("/v1/responses", _answered(self._responses.create), methods=["POST"]),
            self._text_route("/v1/embeddings", EmbeddingsRequest, self._generator.embedder.embed),
        ]

    def _response_routes(self) -> list[BaseRoute]:
        endpoints, path = self._responses, "/v1/responses"
        one = f"{path}/{{id}}"
        return [
            Route(f"{path}/input_tokens", _answered(endpoints.count), methods=["POST"]),
            Route(one, _answered(endpoints.retrieve)),
            Route(one, _answered(endpoints.delete), methods=["DELETE"]),
            Route(f"{one}/input_items", _answered(endpoints.input_items)),
            Route(f"{one}/cancel", _answered(endpoints.cancel), methods=["POST"]),
        ]

    def _ollama_routes(self) -> list[BaseRoute]:
        if not self._settings.ollama:
            return []
        endpoints = OllamaEndpoints(
            self._generator,
            parse=self._parse,
            authenticate=self._authenticate,
            answer=self._answer,
        )
        return endpoints.routes(_answered)

    def _text_routes(self) -> list[BaseRoute]:
        embedder = self._generator.embedder
        return [
            self._text_route("/embed", EmbedRequest, embedder.embed),
            self._text_route("/v1/rerank", RerankRequest, embedder.score),
            self._text_route("/v2/rerank", RerankRequest, embedder.score),
            self._text_route("/rerank", RerankRequest, embedder.score),
            self._text_route("/v1/score", ScoreRequest, embedder.score),
            self._text_route("/score", ScoreRequest, embedder.score),
            self._text_route("/classify", ClassifyRequest, embedder.classify),
        ]

    def _text_route(self, path: str, kind: type[TextsBody], serve: Serve) -> Route:
        """Return a route of requests about whole texts."""
        endpoint = functools.partial(self._texts, kind, serve)
        return Route(path, _answered(endpoint), methods=["POST"])

    def refuse(self) -> None:
        """Refuse new requests, except those that only show status."""
        self._refusing = True

    async def _chat(self, request: Request) -> Response:
        tenant, body = await self._parse(request, ChatRequest)
        return await self._complete(request, tenant, body, ChatFormat(body))

    async def _completions(self, request: Request) -> Response:
        tenant, body = await self._parse(request, CompletionRequest)
        return await self._complete(request, tenant, body, CompletionFormat(body))

    async def _messages(self, request: Request) -> Response:
        tenant, body = await self._parse(request, MessagesRequest)
        answer = MessageAnswer(body, request.state.request_id)
        return await self._answer(request, tenant, body, answer)

    async def _count_tokens(self, request: Request) -> Response:
        tenant, body = await self._parse(request, CountRequest)
        try:
            answer = await self._generator.tokenize(body.tokenize_request(), tenant)
        except rpc.RpcError as error:
            raise from_rpc(error, body.params) from None
        return JSONResponse({"input_tokens": len(answer.token_ids)}, headers=_ignored(body))

    async def _parse(self, request: Request, model: type[M]) -> tuple[Tenant, M]:
        """Authenticate the caller, then read the body, so that unknown callers cannot send one."""
        tenant = self._authenticate(request)
        if self._refusing:
            raise rpc.unavailable("the router is shutting down; retry with another router")
        return tenant, await parse(request, model, self._settings.max_message_bytes)

    def _authenticate(self, request: Request) -> Tenant:
        if (tenant := getattr(request.state, "tenant", None)) is not None:
            return cast("Tenant", tenant)  # of a batch
        authorization = dict(headers.metadata(request)).get("authorization")
        peer = request.client.host if request.client else ""
        tenant = self._authenticator.authenticate(authorization, peer=peer, method=request.url.path)
        request.state.known = True  # keeps the connection when unauthenticated ones are closed
        return tenant

    async def _complete(
        self,
        request: Request,
        tenant: Tenant,
        body: ChatRequest | CompletionRequest,
        answer_format: AnswerFormat,
    ) -> Response:
        answer = Answer(body, answer_format, self._vocabularies, request.state.request_id)
        return await self._answer(request, tenant, body, answer)

    async def _answer(
        self, request: Request, tenant: Tenant, body: GeneratingBody, answer: Calls
    ) -> Response:
        await answer.find_unenforced(self._generator.unenforced)
        extra = _ignored(body) | _unenforced(answer) | answer.headers
        generate = functools.partial(
            self._generator.generate,
            tenant=tenant,
            timeout=headers.timeout(request),
            metadata=headers.metadata(request),
        )
        if body.stream:
            interval = self._settings.http_ping_interval
            return EventStream(request, answer, generate, extra, interval)
        whole = await while_connected(request, answer.whole(generate))
        return JSONResponse(whole, headers={headers.REQUEST_ID: answer.id, **extra})

    async def _texts(self, kind: type[TextsBody], serve: Serve, request: Request) -> Response:
        """Answer a request about whole texts."""
        tenant, body = await self._parse(request, kind)
        timeout, metadata = headers.timeout(request), headers.metadata(request)
        try:
            message = body.message(request.state.request_id)
            serving = serve(message, tenant=tenant, timeout=timeout, metadata=metadata)
            answer: Any = await while_connected(request, serving)
        except rpc.RpcError as error:
            raise from_rpc(error, body.params) from error
        except InvalidArgumentError as error:
            raise from_client(error, body.params) from error
        return JSONResponse(body.answer(answer), headers=_ignored(body))

    async def _tokenize(self, request: Request) -> Response:
        tenant, body = await self._parse(request, tokens.TokenizeRequest)
        answer = await self._generator.tokenize(body.message(), tenant)
        return JSONResponse(tokens.answer(answer), headers=_ignored(body))

    async def _detokenize(self, request: Request) -> Response:
        tenant, body = await self._parse(request, tokens.DetokenizeRequest)
        answer = await self._generator.detokenize(body.message(), tenant)
        return JSONResponse({"prompt": answer.text}, headers=_ignored(body))

    async def _models(self, request: Request) -> Response:
        listed = anthropic_list if speaks_anthropic(request.scope) else openai_list
        return JSONResponse(listed(self._cards(request), self._created))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        card = self._cards(request).get(name)
        if card is None:
            raise self._generator.missing(name, self._authenticate(request))
        shown = anthropic_card if speaks_anthropic(request.scope) else openai_card
        return JSONResponse(shown(card, name, self._created))

    async def _get_status(self, request: Request) -> Response:
        usable = {card.name for card in self._list_models(request)}
        return JSONResponse(await self._stats.status(usable), headers={"Cache-Control": "no-store"})

    async def _metrics(self, request: Request) -> Response:
        """Show the router's metrics: to everyone if no tenants are configured, else to admins.

        Metrics show every tenant's name and tokens, which other tenants must not see.
        """
        tenant = self._authenticate(request)
        if not (self._authenticator.open or tenant.admin):
            raise ApiError(
                403,
                f"tenant {tenant.name!r} is not an admin; without a key, metrics are at "
                "--metrics-port",
                kind="permission_error",
            )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(encode, self._stats.registry)
        return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    async def _version(self, request: Request) -> Response:
        self._authenticate(request)
        return JSONResponse({"version": own_version()})

    def _list_models(self, request: Request) -> Iterable[generation_pb2.ModelCard]:
        return self._generator.list_models(self._authenticate(request)).models

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        serving = self._is_serving()
        status = "serving" if serving else "not serving"
        return JSONResponse({"status": status}, 200 if serving else 503)

    def _cards(self, request: Request) -> dict[str, generation_pb2.ModelCard]:
        """Return the card of each model that the caller may use, under its name and its aliases."""
        cards = self._list_models(request)
        return {name: card for card in cards for name in (card.name, *card.aliases)}


def _answered(endpoint: Handler) -> Handler:
    """Return an endpoint that turns the errors of `endpoint` into responses."""

    @functools.wraps(endpoint)
    async def call(request: Request) -> Response:
        try:
            if request.state.crowded:  # the health endpoint still answers
                raise rpc.unavailable("no file descriptors are left; retry later")
            return await endpoint(request)
        except rpc.RpcError as error:
            return from_rpc(error).response(request.scope)
        except InvalidArgumentError as error:
            return from_client(error).response(request.scope)
        except (ApiError, ClientLeftError) as error:
            return _refusal(request, error)

    return call


def _ignored(body: GeneratingBody | OpenBody) -> dict[str, str]:
    """Return the header with the names of ignored arguments, if there are any."""
    names = body.ignored()
    return {IGNORED: ", ".join(names)} if names else {}


def _unenforced(answer: Calls) -> dict[str, str]:
    """Return the header with the parts of schemas that are not enforced, if there are any."""
    value = ", ".join(quote(place, safe="/#~[]$") for place in answer.unenforced)
    if len(value) > MAX_UNENFORCED:
        value = f"{value[:MAX_UNENFORCED].rpartition(', ')[0]}, ..."
    return {UNENFORCED: value} if value else {}


def _refusal(request: Request, error: ApiError | ClientLeftError) -> Response:
    if isinstance(error, ApiError):
        return error.response(request.scope)
    return Response(status_code=499)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:256]}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response(request.scope)


async def _broken(request: Request, error: Exception) -> Response:  # noqa: ARG001 - it is logged
    message = "an unexpected error; the server's log has the details"
    return ApiError(500, message, kind="server_error").response(request.scope)


ERRORS = {HTTPException: _not_there, Exception: _broken}
"""The answers to errors that no endpoint handles."""
