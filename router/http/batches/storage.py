"""The directory of files and batches: a file each, and an index of both with their owners."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

from octavo.common.background import OneThread
from octavo.common.settings import SettingsError

GIB = 1 << 30
Kind = Literal["file", "batch"]
Body = dict[str, Any]
"""A file or batch, as the API shows it."""
_TABLE = """
    CREATE TABLE IF NOT EXISTS objects (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    );
"""
T = TypeVar("T")


class BatchStorage:
    """Open the directory, for this process alone.

    Args:
        directory: The directory; made if it is not there.
        gib: Maximum GiB of the files in it.

    Attributes:
        max_bytes: Maximum bytes of the files in it.

    Raises:
        SettingsError: It cannot be used, or another router uses it.
    """

    def __init__(self, directory: Path, gib: float) -> None:
        self.max_bytes = int(gib * GIB)
        self._directory = directory
        self._lock = FileLock(directory / "lock")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._database = sqlite3.connect(
                directory / "index.sqlite", isolation_level=None, check_same_thread=False
            )
            self._database.executescript(_TABLE)
        except Timeout:
            raise SettingsError(f"--batch-dir {directory} is in use by another router") from None
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"--batch-dir {directory} cannot be used: {error}") from None
        self._thread = OneThread("batch-index")
        self._closed = False

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._directory / f"{file_id}.jsonl"

    def left(self) -> int:
        """Return the number of bytes that files may still take."""
        taken = 0
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # the index's journal comes and goes
                taken += path.stat().st_size
        return self.max_bytes - taken

    async def put(self, tenant: str, body: Body) -> None:
        """Keep or replace a file or batch."""
        row = (body["id"], tenant, body["object"], json.dumps(body))
        query = (
            "INSERT INTO objects (id, tenant, kind, body) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET body = excluded.body"
        )
        await self._run(lambda: self._database.execute(query, row))

    async def get(self, tenant: str, kind: Kind, object_id: str) -> Body | None:
        """Return a tenant's file or batch; None if the tenant has none of this id."""
        query = "SELECT body FROM objects WHERE id = ? AND tenant = ? AND kind = ?"
        values = (object_id, tenant, kind)
        row = await self._run(lambda: self._database.execute(query, values).fetchone())
        return None if row is None else json.loads(row[0])

    async def page(
        self,
        tenant: str,
        kind: Kind,
        after: str | None,
        limit: int,
        *,
        purpose: str | None = None,
    ) -> list[Body]:
        """Return a tenant's files or batches, the latest first.

        Args:
            tenant: Name of the tenant.
            kind: What to return.
            after: Id of the one before the first to return; None: from the latest on.
            limit: Maximum number.
            purpose: Purpose of files to return; None: of all.
        """
        query = (
            "SELECT body FROM objects WHERE tenant = ? AND kind = ? AND number <"
            " coalesce((SELECT number FROM objects WHERE id = ? AND tenant = ?), 1 << 62)"
            " AND (? IS NULL OR json_extract(body, '$.purpose') = ?)"
            " ORDER BY number DESC LIMIT ?"
        )
        values = (tenant, kind, after, tenant, purpose, purpose, limit)
        rows = await self._run(lambda: self._database.execute(query, values).fetchall())
        return [json.loads(row[0]) for row in rows]

    async def batches(self) -> list[tuple[str, Body]]:
        """Return all batches with their tenants, the oldest first."""
        query = "SELECT tenant, body FROM objects WHERE kind = 'batch' ORDER BY number"
        rows = await self._run(lambda: self._database.execute(query).fetchall())
        return [(tenant, json.loads(body)) for tenant, body in rows]

    async def delete_file(self, file_id: str) -> None:
        """Delete a file and its content."""
        query = "DELETE FROM objects WHERE id = ?"
        await self._run(lambda: self._database.execute(query, (file_id,)))
        self.path(file_id).unlink(missing_ok=True)

    async def close(self) -> None:
        """Close the index, after the calls in progress; closed twice is closed once."""
        if not self._closed:
            self._closed = True
            await self._run(self._database.close)
            self._thread.close()
            self._lock.release()

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._thread.call(work)
