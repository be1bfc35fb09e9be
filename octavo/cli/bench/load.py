"""The load generator: sends requests and records when tokens arrive.

It may share the machine with the server, so it does little per message; metrics are
computed after the run.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from octavo.cli.bench.endpoint import Endpoint, RequestError, TokenMessage
from octavo.cli.bench.metrics import OK, Record
from octavo.cli.bench.workload import BenchRequest
from octavo.client import Usage


class Load:
    """Send requests in a closed or an open loop.

    Args:
        endpoint: The server.
        model: The model's name.
        salt: Prefix-cache salt, so that runs share no cached blocks.
        timeout: Deadline per request in seconds.
        on_end: Called at the end of each request.

    Attributes:
        records: Records of ended requests, in order of ending.
        sent: Requests sent so far.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        *,
        salt: str,
        timeout: float | None = None,
        on_end: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.records: list[Record] = []
        self.sent = 0
        self._endpoint = endpoint
        self._model = model
        self._salt = salt
        self._timeout = timeout
        self._on_end = on_end
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._started

    async def send_closed(self, requests: Sequence[BenchRequest], concurrency: int) -> None:
        """Keep `concurrency` requests in flight until all have ended."""
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for index, request in waiting:
                await self._send(index, request, self.seconds)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def send_open(self, requests: Sequence[BenchRequest], times: Sequence[float]) -> None:
        """Send each request at its time, in seconds, and wait until all have ended."""
        async with asyncio.TaskGroup() as group:
            for index, (request, due) in enumerate(zip(requests, times, strict=True)):
                await asyncio.sleep(due - self.seconds)
                group.create_task(self._send(index, request, due))

    async def _send(self, index: int, request: BenchRequest, due: float) -> None:
        """Send one request and record its stream."""
        times, tokens, usages = list[float](), list[int](), list[Usage]()
        code, message = OK, ""
        self.sent += 1
        sent = self.seconds
        try:
            async for event in self._endpoint.stream(
                request, model=self._model, salt=self._salt, timeout=self._timeout
            ):
                if isinstance(event, TokenMessage):
                    times.append(round(self.seconds, 6))
                    if event.tokens is not None:
                        tokens.append(event.tokens)
                else:
                    usages.append(event)
        except RequestError as error:
            code, message = error.code, error.message
        ended = self.seconds
        record = Record(
            index=index,
            due=round(due, 6),
            sent=round(sent, 6),
            ended=round(ended, 6),
            message_times=tuple(times),
            message_tokens=tuple(tokens),
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            output_tokens=sum(usage.output_tokens for usage in usages),
            code=code,
            error=message,
        )
        self.records.append(record)
        self._on_end(record)
