"""Runs batches through the router's own API, at the lowest priority and for their tenants."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.common.background import end, report_failure, start
from octavo.offline.batch import Batch
from octavo.offline.batch_files import BatchFiles, is_answer
from octavo.router.http.batches.storage import BatchStorage, Body
from octavo.router.http.connection import CROWDED
from octavo.router.tenants.tenant import Tenant

log = structlog.get_logger(__name__)

CHECK_SECONDS = 1.0
"""Seconds between checks that the directory has room for more results."""
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""States of batches that end, or go on after a restart."""


class BatchError(Exception):
    """A batch fails as a whole.

    Attributes:
        code: The reason, for programs.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Running(NamedTuple):
    """A batch that has not ended: what runs it, and what waits for that."""

    tenant: str
    body: Body
    work: asyncio.Task[None]
    follow: asyncio.Task[None]


class BatchRunner:
    """Run batches: one of each tenant at a time, in order.

    Args:
        storage: The batches and their files.
        app: The API that answers their requests.
        find_tenant: Returns the tenant of a name; None if there is none any more.
        in_flight: Maximum number of a batch's requests in progress.
    """

    def __init__(
        self,
        storage: BatchStorage,
        app: ASGIApp,
        find_tenant: Callable[[str], Tenant | None],
        in_flight: int,
    ) -> None:
        self._storage = storage
        self._app = app
        self._find_tenant = find_tenant
        self._in_flight = in_flight
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: dict[str, _Running] = {}

    async def resume(self) -> None:
        """Go on with the batches that have not ended."""
        for tenant, body in await self._storage.batches():
            if body["status"] in UNFINISHED:
                self.begin(tenant, body)

    def begin(self, tenant: str, body: Body) -> None:
        """Run a batch, after the tenant's earlier ones."""
        batch_id = body["id"]
        work = start(self._work(tenant, body), f"batch:{batch_id}")
        if body["status"] == "cancelling":  # before a restart
            work.cancel()
        follow = report_failure(partial(self._follow, tenant, body, work), f"batch-end:{batch_id}")
        follow.add_done_callback(lambda _: self._running.pop(batch_id))
        self._running[batch_id] = _Running(tenant, body, work, follow)

    def current(self, body: Body) -> Body:
        """Return a batch, or a file, as it is now."""
        running = self._running.get(body["id"])
        return body if running is None else running.body

    def reads(self, file_id: str) -> bool:
        """Return whether a batch that has not ended reads a file."""
        return any(each.body["input_file_id"] == file_id for each in self._running.values())

    def unfinished(self, tenant: str) -> int:
        """Return the number of a tenant's batches that have not ended."""
        return sum(each.tenant == tenant for each in self._running.values())

    async def cancel(self, tenant: str, body: Body) -> Body:
        """Cancel a batch that has not ended; return it."""
        running = self._running.get(body["id"])
        if running is None:
            return body
        if not running.work.done():
            running.work.cancel()
            _enter(running.body, "cancelling")
            await self._storage.put(tenant, running.body)
        return running.body

    async def stop(self) -> None:
        """Stop all batches; `resume` goes on with them."""
        await end(*(each.follow for each in self._running.values()))

    async def _follow(self, tenant: str, body: Body, work: asyncio.Task[None]) -> None:
        """Wait for a batch's work, and show how it ended."""
        try:
            await asyncio.wait({work})
        finally:
            await end(work)
        error: tuple[str, str] | None = None
        if work.cancelled():
            status = "cancelled"
        elif (failure := work.exception()) is None:
            status = "completed"
        elif isinstance(failure, TimeoutError):
            status = "expired"
        elif isinstance(failure, BatchError):
            status, error = "failed", (failure.code, str(failure))
        else:
            log.error("batch failed", batch=body["id"], exc_info=failure)
            status = "failed"
            error = "internal_error", "an unexpected error; the server's log has the details"
        await self._finish(tenant, body, status, error)

    async def _work(self, tenant: str, body: Body) -> None:
        """Run a batch in its turn.

        Raises:
            BatchError: The batch cannot go on.
            TimeoutError: Its time is over.
        """
        async with self._turns[tenant], asyncio.timeout(body["expires_at"] - time.time()):
            await self._complete(tenant, body)

    async def _complete(self, tenant: str, body: Body) -> None:
        """Run the requests that are not done.

        Raises:
            BatchError: The batch cannot go on.
        """
        requests, results, errors = self._paths(body)
        files = await asyncio.to_thread(BatchFiles, requests, results, errors)
        try:
            total = await asyncio.to_thread(_count, requests)
            if not total:
                raise BatchError("empty_file", "the input file has no requests")
            counts = {"total": total, "completed": files.completed, "failed": files.failed}
            body["request_counts"] = counts
            if body["status"] == "validating":
                _enter(body, "in_progress")
            await self._storage.put(tenant, body)
            checked = 0.0

            def count(result: dict[str, Any]) -> None:
                nonlocal checked
                counts["completed" if is_answer(result) else "failed"] += 1
                if time.monotonic() > checked + CHECK_SECONDS:
                    checked = time.monotonic()
                    self._check(tenant)

            transport = httpx2.ASGITransport(app=self._as(tenant), raise_app_exceptions=False)
            client = httpx2.AsyncClient(
                base_url="http://octavo", transport=transport, trust_env=False, timeout=None
            )
            async with client:
                batch = Batch(client, self._in_flight, lowest=True, endpoint=body["endpoint"])
                await batch.run(files, count)
        finally:
            await asyncio.to_thread(files.close)

    def _check(self, tenant: str) -> Tenant:
        """Check that there is room for results, and that the tenant still exists; return it.

        Raises:
            BatchError: The batch cannot go on.
        """
        if self._storage.left() < 0:
            raise BatchError("storage_full", "--batch-space is full: delete files")
        if (found := self._find_tenant(tenant)) is None:
            raise BatchError("no_tenant", "the tenant does not exist any more")
        return found

    async def _finish(
        self, tenant: str, body: Body, status: str, error: tuple[str, str] | None
    ) -> None:
        """Show the results that there are, and the batch's end."""
        _, *outputs = self._paths(body)
        for member, path in zip(("output_file_id", "error_file_id"), outputs, strict=True):
            size = path.stat().st_size if path.exists() else 0
            if not size:
                path.unlink(missing_ok=True)
                continue
            shown = file_body(path.stem, f"{body['id']}_{member[:-8]}.jsonl", "batch_output", size)
            await self._storage.put(tenant, shown)
            body[member] = path.stem
        if error is not None:
            shown = {"code": error[0], "message": error[1], "param": None, "line": None}
            body["errors"] = {"object": "list", "data": [shown]}
        _enter(body, status)
        await self._storage.put(tenant, body)
        log.info("batch ended", batch=body["id"], tenant=tenant, status=status)

    def _paths(self, body: Body) -> tuple[Path, Path, Path]:
        """Return the paths of a batch's requests, results and errors."""
        name = body["id"].replace("batch_", "file-")
        ids = body["input_file_id"], f"{name}-output", f"{name}-error"
        requests, results, errors = map(self._storage.path, ids)
        return requests, results, errors

    def _as(self, tenant: str) -> ASGIApp:
        """Return the API with the tenant already authenticated: a batch's requests have no key."""
        known = self._check(tenant)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal known
            known = self._find_tenant(tenant) or known
            await self._app({**scope, "state": {"tenant": known, CROWDED: False}}, receive, send)

        return call


def file_body(file_id: str, filename: str, purpose: str, size: int) -> Body:
    """Return a new file as the API shows it."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _enter(body: Body, status: str) -> None:
    """Set a batch's state, and the time."""
    body["status"] = status
    body[f"{status}_at"] = int(time.time())


def _count(path: Path) -> int:
    """Return the number of requests in a file."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
