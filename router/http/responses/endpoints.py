"""The paths under /v1/responses."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.common import rpc
from octavo.router.generate import Generator
from octavo.router.http.answers import Vocabularies
from octavo.router.http.endpoint import Answer, Authenticate, Parse
from octavo.router.http.errors import ApiError, from_rpc
from octavo.router.http.responses.answer import ResponseAnswer
from octavo.router.http.responses.schema import Item, ResponsesRequest
from octavo.router.http.responses.store import ResponseStore, Stored
from octavo.router.tenants.tenant import Tenant

OUTPUT_ROOM = 1024
"""Tokens that truncation leaves for an output without `max_output_tokens`."""
_ITEMS = TypeAdapter(list[Item])


class ResponseEndpoints:
    """The endpoints of the Responses API.

    Args:
        store: The responses to continue.
        generator: Counts tokens.
        vocabularies: Models' vocabularies.
        parse: Authenticates a request and reads its body.
        authenticate: Returns a request's tenant.
        answer: Sends an answer.
    """

    def __init__(
        self,
        store: ResponseStore,
        generator: Generator,
        vocabularies: Vocabularies,
        *,
        parse: Parse,
        authenticate: Authenticate,
        answer: Answer,
    ) -> None:
        self._store = store
        self._generator = generator
        self._vocabularies = vocabularies
        self._parse = parse
        self._authenticate = authenticate
        self._answer = answer

    async def create(self, request: Request) -> Response:
        """Generate a response."""
        tenant, body = await self._read(request)
        items = body.input
        if body.truncation == "auto":
            body = await self._truncated(body, tenant)
        keep = None if body.store is False else partial(self._keep, tenant, items)
        answer = ResponseAnswer(body, self._vocabularies, request.state.request_id, keep)
        return await self._answer(request, tenant, body, answer)

    async def count(self, request: Request) -> Response:
        """Count the tokens of an input."""
        tenant, body = await self._read(request)
        tokens, _ = await self._count(body, tenant)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, request: Request) -> Response:
        """Return a stored response, which is never streamed again."""
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "stream is not supported: responses are stored when complete")
        return JSONResponse((await self._find(request)).body)

    async def input_items(self, request: Request) -> Response:
        """Return the input of a stored response, the latest item first, all at once."""
        stored = await self._find(request)
        data = [{"id": f"item_{i}", **item} for i, item in enumerate(stored.input)]
        if request.query_params.get("order") != "asc":
            data.reverse()
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})

    async def delete(self, request: Request) -> Response:
        """Forget a stored response."""
        tenant, response_id = self._authenticate(request), request.path_params["id"]
        if not await self._store.delete(tenant.name, response_id):
            raise _unknown(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Refuse: a stored response is complete."""
        await self._find(request)
        raise ApiError(
            400,
            "only background responses can be cancelled, which are not supported; close the "
            "connection of a response in progress",
        )

    async def _read(self, request: Request) -> tuple[Tenant, ResponsesRequest]:
        """Return the tenant, and the body with the items of earlier responses before its own."""
        tenant, body = await self._parse(request, ResponsesRequest)
        if body.previous_response_id is not None:
            stored = await self._store.get(tenant.name, body.previous_response_id)
            if stored is None:
                raise ApiError(
                    400,
                    f"previous_response_id {body.previous_response_id[:128]!r} is not stored",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            body = body.with_input([*_ITEMS.validate_python(stored.items), *body.input])
        if not (body.input or body.instructions):
            raise ApiError(400, "input must have at least one item", param="input")
        return tenant, body

    async def _keep(self, tenant: Tenant, items: Sequence[Item], body: dict[str, Any]) -> None:
        given = [item.model_dump(mode="json", exclude_unset=True) for item in items]
        await self._store.put(tenant.name, Stored(body, given))

    async def _find(self, request: Request) -> Stored:
        tenant, response_id = self._authenticate(request), request.path_params["id"]
        stored = await self._store.get(tenant.name, response_id)
        if stored is None:
            raise _unknown(response_id)
        return stored

    async def _count(self, body: ResponsesRequest, tenant: Tenant) -> tuple[int, int]:
        """Return the tokens of an input, and the model's context."""
        try:
            counted = await self._generator.tokenize(body.tokenize_request(), tenant)
        except rpc.RpcError as error:
            raise from_rpc(error, body.params) from None
        return len(counted.token_ids), counted.max_model_len

    async def _truncated(self, body: ResponsesRequest, tenant: Tenant) -> ResponsesRequest:
        """Return the body without its oldest turns, as few as make it fit the context."""
        turns = [i for i, item in enumerate(body.input) if item.role == "user"]
        lead = list(body.input[: turns[0]]) if turns else []

        async def cut(turn: int) -> tuple[ResponsesRequest, bool]:
            shorter = body.with_input([*lead, *body.input[turns[turn] :]])
            tokens, context = await self._count(shorter, tenant)
            room = min(body.max_output_tokens or OUTPUT_ROOM, context // 2)
            return shorter, tokens + room <= context

        if not turns:
            return body
        low, high = 0, len(turns) - 1
        if (await cut(0))[1]:
            return body
        while low < high:
            middle = (low + high) // 2
            if (await cut(middle))[1]:
                high = middle
            else:
                low = middle + 1
        return (await cut(low))[0]


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"response {response_id[:128]!r} is not stored", code="not_found")
