"""Checks complete outputs against JSON Schemas, in another process."""

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

import structlog

from octavo.common import rpc
from octavo.router.requests.held_schemas import HeldSchemas

log = structlog.get_logger(__name__)

CHECK_SECONDS = 1.0
"""Maximum CPU seconds of one check."""
WALL_SECONDS = 10.0
"""Maximum elapsed seconds of one check, which is more if other processes use the CPUs."""
MAX_ERRORS = 8
TOO_LARGE = f"it takes more than {CHECK_SECONDS:g} s or too much memory to check"


class SchemaChecker:
    """A process that checks outputs; it starts on demand, and again if it ends."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def check_schemas(self, checks: HeldSchemas) -> None:
        """Check that schemas are valid.

        Raises:
            rpc.RpcError: INVALID_ARGUMENT: a schema is not valid.
        """
        for field, schema in checks.fields.items():
            outcome = await self._ask(schema, None)
            if (why := outcome.get("invalid")) is not None:
                raise rpc.invalid(field, f"{field} cannot be used: {why}")

    async def errors(self, parts: Mapping[str, tuple[str, str]]) -> list[str]:
        """Return an output's schema violations, with their places.

        Args:
            parts: The JSON Schema, as JSON, and the text of each part of the output, by its name.
        """
        messages: list[str] = []
        for name, (schema, text) in parts.items():
            outcome = await self._ask(schema, text)
            why = outcome.get("invalid")
            errors = outcome["errors"] if why is None else [f": it was not checked: {why}"]
            messages += (f"{name}{error}" for error in errors)
        return messages[:MAX_ERRORS]

    async def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:
            self._kill()
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _ask(self, schema: str, text: str | None) -> dict[str, Any]:
        line = json.dumps([schema, text]).encode() + b"\n"
        async with self._turn:
            try:
                async with asyncio.timeout(WALL_SECONDS):
                    answer = await self._exchange(line)
            except (OSError, TimeoutError) as error:
                log.warning("a JSON Schema was not checked", error=repr(error))
                answer = b""
            except BaseException:
                self._kill()  # else the next check would read this answer
                raise
            if not answer:
                self._kill()
                return {"invalid": TOO_LARGE}
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    async def _exchange(self, line: bytes) -> bytes:
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        await process.stdin.drain()
        return await process.stdout.readline()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.router.requests.schema_sandbox", str(CHECK_SECONDS)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # the router handles Ctrl-C; uvloop lacks process_group
        )
