"""The endpoints of Ollama's API."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from octavo.client.requests import embed_request
from octavo.client.responses import embeddings, state_name
from octavo.common.version import own_version
from octavo.router.generate import Generator
from octavo.router.http.body import while_connected
from octavo.router.http.endpoint import Answer, Authenticate, Handler, Parse
from octavo.router.http.errors import ApiError
from octavo.router.http.ollama.answer import OllamaAnswer, now
from octavo.router.http.ollama.schema import (
    ChatBody,
    EmbedBody,
    GenerateBody,
    Named,
)
from octavo.router.tenants.tenant import Tenant
from octavo.v1 import generation_pb2

DETAILS = {"format": "", "family": "", "parameter_size": "", "quantization_level": ""}
"""What Ollama tells of a model's file, which the router does not know."""


class OllamaEndpoints:
    """Translate Ollama's API.

    Args:
        generator: Serves the requests.
        parse: Authenticates the caller and reads the body.
        authenticate: Authenticates the caller.
        answer: Generates an answer, whole or as a stream.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        parse: Parse,
        authenticate: Authenticate,
        answer: Answer,
    ) -> None:
        self._generator = generator
        self._parse = parse
        self._authenticate = authenticate
        self._answer = answer

    def routes(self, answered: Callable[[Handler], Handler]) -> list[BaseRoute]:
        """Return the routes.

        Args:
            answered: Turns an endpoint's errors into responses.
        """
        return [
            Route("/api/chat", answered(self._chat), methods=["POST"]),
            Route("/api/generate", answered(self._generate), methods=["POST"]),
            Route("/api/embed", answered(self._embed), methods=["POST"]),
            Route("/api/embeddings", answered(self._embed_one), methods=["POST"]),
            Route("/api/show", answered(self._show), methods=["POST"]),
            Route("/api/tags", answered(self._tags)),
            Route("/api/ps", answered(self._ps)),
            Route("/api/version", answered(self._version)),
        ]

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, *await self._parse(request, ChatBody))

    async def _generate(self, request: Request) -> Response:
        return await self._complete(request, *await self._parse(request, GenerateBody))

    async def _complete(
        self, request: Request, tenant: Tenant, body: ChatBody | GenerateBody
    ) -> Response:
        answer = OllamaAnswer(body, request.state.request_id)
        if not body.empty:
            return await self._answer(request, tenant, body, answer)
        if body.unloads:
            await self._generator.unload(answer.model, tenant)
        else:
            empty = generation_pb2.TokenizeRequest(model=answer.model, text="")
            await while_connected(request, self._generator.tokenize(empty, tenant))
        reason = "unload" if body.unloads else "load"
        return JSONResponse(answer.body() | {"done_reason": reason})

    async def _embed(self, request: Request) -> Response:
        tenant, body = await self._parse(request, EmbedBody)
        if body.input is None:
            raise ApiError(400, "input must be set", param="input")
        response = await self._embeddings(request, tenant, body, body.input)
        vectors = [vector.tolist() for vector in embeddings(response)]
        counted = sum(response.token_counts)
        return JSONResponse(
            {"model": response.model, "embeddings": vectors, "prompt_eval_count": counted}
        )

    async def _embed_one(self, request: Request) -> Response:
        tenant, body = await self._parse(request, EmbedBody)
        response = await self._embeddings(request, tenant, body, [body.prompt])
        return JSONResponse({"embedding": next(iter(embeddings(response))).tolist()})

    async def _embeddings(
        self, request: Request, tenant: Tenant, body: EmbedBody, texts: list[Any]
    ) -> generation_pb2.EmbedResponse:
        message = embed_request(
            texts,
            model=body.model or body.name,
            dimensions=body.dimensions,
            truncate=body.truncate is not False,
            request_id=request.state.request_id,
        )
        embed = self._generator.embedder.embed(message, tenant=tenant)
        return await while_connected(request, embed)

    async def _show(self, request: Request) -> Response:
        tenant, body = await self._parse(request, Named)
        name = body.model or body.name
        for card in self._cards(tenant):
            if name in (card.name, *card.aliases):
                embeds = bool(card.embedding_dimensions)
                capabilities = ["embedding"] if embeds else ["completion", "tools"]
                info = {"general.context_length": card.max_model_len}
                return JSONResponse(
                    {"details": DETAILS, "model_info": info, "capabilities": capabilities}
                )
        raise self._generator.missing(name, tenant)

    async def _tags(self, request: Request) -> Response:
        cards = self._cards(self._authenticate(request))
        names = [name for card in cards for name in (card.name, *card.aliases)]
        return JSONResponse({"models": [_listed(name) for name in names]})

    async def _ps(self, request: Request) -> Response:
        cards = self._cards(self._authenticate(request))
        loaded = [card.name for card in cards if state_name(card) == "loaded"]
        return JSONResponse({"models": [_listed(name) for name in loaded]})

    async def _version(self, request: Request) -> Response:
        self._authenticate(request)
        return JSONResponse({"version": own_version()})

    def _cards(self, tenant: Tenant) -> list[generation_pb2.ModelCard]:
        return list(self._generator.list_models(tenant).models)


def _listed(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": now(),
        "size": 0,
        "digest": "",
        "details": DETAILS,
    }
