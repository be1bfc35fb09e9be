"""Keeps responses, so that later requests can continue them."""

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from octavo.common.background import OneThread
from octavo.common.settings import SettingsError

log = structlog.get_logger(__name__)

GIB = 1 << 30
LOCK_SECONDS = 10.0
"""Maximum seconds to wait for another process that writes to the file."""
_TABLES = """
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS responses (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        body TEXT NOT NULL,
        input TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        UNIQUE (tenant, id)
    );
    DROP INDEX IF EXISTS sizes;
    CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
    INSERT INTO total SELECT (SELECT coalesce(sum(bytes), 0) FROM responses)
        WHERE NOT EXISTS (SELECT 1 FROM total);
    CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses
        BEGIN UPDATE total SET bytes = bytes + NEW.bytes; END;
    CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses
        BEGIN UPDATE total SET bytes = bytes - OLD.bytes; END;
    COMMIT;
"""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response.

    Attributes:
        body: The response's JSON.
        input: All items of its input, those of earlier responses included.
    """

    body: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        return [*self.input, *self.body["output"]]


class ResponseStore:
    """The responses of all tenants, in memory or in an SQLite file; the oldest are dropped.

    Args:
        path: The file; None: memory.
        gib: Maximum GiB of responses and their inputs.

    Raises:
        SettingsError: The file cannot be used.
    """

    def __init__(self, path: Path | None, gib: float) -> None:
        self._max_bytes = int(gib * GIB)
        try:
            if path is not None:
                path.touch(mode=0o600)  # others may not read tenants' texts
            self._database = sqlite3.connect(
                path or ":memory:",
                timeout=LOCK_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("PRAGMA recursive_triggers = ON")  # for rows that are replaced
            self._database.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"--response-store {path} cannot be used: {error}") from None
        self._thread = OneThread("responses")
        self._closed = False

    async def put(self, tenant: str, response: Stored) -> None:
        """Keep a response, unless the disk is full or fails: its client has its answer anyway."""
        body, items = json.dumps(response.body), json.dumps(response.input)
        size, most = len(body) + len(items), self._max_bytes

        def write() -> None:
            row = (tenant, response.body["id"], body, items, size)
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute(
                    "INSERT OR REPLACE INTO responses (tenant, id, body, input, bytes)"
                    " VALUES (?, ?, ?, ?, ?)",
                    row,
                )
                while self._database.execute("SELECT bytes FROM total").fetchone()[0] > most:
                    self._database.execute(
                        "DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)"
                    )

        try:
            await self._run(write)
        except sqlite3.Error as error:
            log.warning("response not stored", reason=str(error))

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """Return a tenant's response; None if it is not there."""

        def read() -> Stored | None:
            row = self._database.execute(
                "SELECT body, input FROM responses WHERE tenant = ? AND id = ?",
                (tenant, response_id),
            ).fetchone()
            return None if row is None else Stored(json.loads(row[0]), json.loads(row[1]))

        return await self._run(read)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a tenant's response; return whether it was there."""

        def remove() -> bool:
            query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return self._database.execute(query, (tenant, response_id)).rowcount > 0

        return await self._run(remove)

    async def close(self) -> None:
        """Close the file, after the calls in progress; closed twice is closed once."""
        if not self._closed:
            self._closed = True
            await self._thread.call(self._database.close)
            self._thread.close()

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._thread.call(work)
