"""The paths under /v1/files and /v1/batches."""

import time
import uuid
from collections.abc import Callable
from typing import Literal, NoReturn

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from octavo.router.http.batches.runner import BatchRunner, file_body
from octavo.router.http.batches.storage import BatchStorage, Body, Kind
from octavo.router.http.batches.upload import Upload, read_upload
from octavo.router.http.bodies import OpenBody
from octavo.router.http.endpoint import Authenticate, Handler, Parse
from octavo.router.http.errors import ApiError
from octavo.router.http.no_ops import Never
from octavo.router.tenants.tenant import Tenant

WINDOW_SECONDS = 24 * 3600
MAX_UNFINISHED = 100
"""Maximum batches of a tenant that have not ended."""
MAX_PAGE = 100


class BatchRequest(OpenBody):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Never = None


class BatchEndpoints:
    """The endpoints of files and batches.

    Args:
        storage: The files and batches.
        runner: Runs the batches.
        parse: Authenticates a request and reads its body.
        authenticate: Returns a request's tenant.
    """

    def __init__(
        self,
        storage: BatchStorage,
        runner: BatchRunner,
        *,
        parse: Parse,
        authenticate: Authenticate,
    ) -> None:
        self._storage = storage
        self._runner = runner
        self._parse = parse
        self._authenticate = authenticate

    def routes(self, answered: Callable[[Handler], Handler]) -> list[BaseRoute]:
        """Return the routes, whose endpoints `answered` wraps."""
        return [
            Route("/v1/files", answered(self._create_file), methods=["POST"]),
            Route("/v1/files", answered(self._list_files)),
            Route("/v1/files/{id}", answered(self._get_file)),
            Route("/v1/files/{id}", answered(self._delete_file), methods=["DELETE"]),
            Route("/v1/files/{id}/content", answered(self._get_content)),
            Route("/v1/batches", answered(self._create_batch), methods=["POST"]),
            Route("/v1/batches", answered(self._list_batches)),
            Route("/v1/batches/{id}", answered(self._get_batch)),
            Route("/v1/batches/{id}/cancel", answered(self._cancel_batch), methods=["POST"]),
        ]

    async def _create_file(self, request: Request) -> Response:
        tenant, file_id = self._authenticate(request), f"file-{uuid.uuid4().hex}"
        path = self._storage.path(file_id)
        try:
            upload = await read_upload(request, path, self._storage.left)
            body = file_body(file_id, _filename(upload), "batch", path.stat().st_size)
            await self._storage.put(tenant.name, body)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return JSONResponse(body)

    async def _list_files(self, request: Request) -> Response:
        return await self._list(request, "file", request.query_params.get("purpose"))

    async def _get_file(self, request: Request) -> Response:
        _, body = await self._find(request, "file")
        return JSONResponse(body)

    async def _delete_file(self, request: Request) -> Response:
        _, body = await self._find(request, "file")
        if self._runner.reads(body["id"]):
            raise ApiError(400, f"{body['id']} is the input of a batch that has not ended")
        await self._storage.delete_file(body["id"])
        return JSONResponse({"id": body["id"], "object": "file", "deleted": True})

    async def _get_content(self, request: Request) -> Response:
        _, body = await self._find(request, "file")
        return FileResponse(self._storage.path(body["id"]), media_type="application/jsonl")

    async def _create_batch(self, request: Request) -> Response:
        tenant, asked = await self._parse(request, BatchRequest)
        file = await self._storage.get(tenant.name, "file", asked.input_file_id)
        if file is None or file["purpose"] != "batch":
            shown = asked.input_file_id[:128]
            raise ApiError(400, f"input_file_id {shown!r} is no file", param="input_file_id")
        if self._runner.unfinished(tenant.name) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches have not ended: wait for them or cancel some"
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_batches")
        if self._storage.left() <= 0:
            raise ApiError(413, "--batch-space is full: delete files first")
        body = _batch_body(asked)
        await self._storage.put(tenant.name, body)
        self._runner.begin(tenant.name, body)
        return JSONResponse(body)

    async def _list_batches(self, request: Request) -> Response:
        return await self._list(request, "batch")

    async def _get_batch(self, request: Request) -> Response:
        _, body = await self._find(request, "batch")
        return JSONResponse(self._runner.current(body))

    async def _cancel_batch(self, request: Request) -> Response:
        tenant, body = await self._find(request, "batch")
        return JSONResponse(await self._runner.cancel(tenant.name, body))

    async def _find(self, request: Request, kind: Kind) -> tuple[Tenant, Body]:
        tenant, object_id = self._authenticate(request), request.path_params["id"]
        body = await self._storage.get(tenant.name, kind, object_id)
        if body is None:
            raise ApiError(404, f"there is no {kind} {object_id[:128]!r}", code="not_found")
        return tenant, body

    async def _list(self, request: Request, kind: Kind, purpose: str | None = None) -> Response:
        tenant, query = self._authenticate(request), request.query_params
        given = query.get("limit", "")
        limit = min(int(given), MAX_PAGE) if given.isdecimal() and int(given) else MAX_PAGE
        if query.get("order", "desc") != "desc":
            raise ApiError(400, 'order is supported only as "desc"', param="order")
        page = await self._storage.page(
            tenant.name, kind, query.get("after"), limit + 1, purpose=purpose
        )
        data = [self._runner.current(body) for body in page[:limit]]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        more = len(page) > limit
        return JSONResponse({"object": "list", "data": data, "has_more": more, **ends})


def _filename(upload: Upload) -> str:
    """Return the name of an uploaded file.

    Raises:
        ApiError: There is no file, or it is not for a batch.
    """
    if upload.filename is None:
        raise ApiError(400, "the form must have a file", param="file")
    if bytes(upload.fields.get("purpose", b"")) != b"batch":
        raise ApiError(400, 'purpose is supported only as "batch"', param="purpose")
    return upload.filename[:256]


async def batches_are_off(_: Request) -> NoReturn:
    """Refuse a request for files or batches, where there is no directory for them.

    Raises:
        ApiError: Always.
    """
    raise ApiError(404, "files and batches are off: they need the router's --batch-dir")


def _batch_body(asked: BatchRequest) -> Body:
    """Return a new batch as the API shows it."""
    now = int(time.time())
    states = ("in_progress", "finalizing", "completed", "failed", "expired")
    return {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": None,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **{f"{state}_at": None for state in (*states, "cancelling", "cancelled")},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked.metadata,
    }
