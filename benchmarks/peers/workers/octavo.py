"""Octavo as users run it: `octavo serve`, and the asyncio client over gRPC."""

import asyncio
import atexit
import contextlib
import io
import re
import time
from collections.abc import Sequence

import typer

from octavo import AsyncClient, Delta
from octavo.cli.local_server import local_server
from octavo.common.sampling_parameters import NEUTRAL, GenerateOptions

from .protocol import Outcome, Request, Runner, Setup, serve

BOXES = re.compile(r"[│╭╮╰╯─\s]+")
GREEDY: GenerateOptions = {**NEUTRAL, "temperature": 0}
HOURS = "36000"
"""Seconds, longer than any run, so that a server does not drop its engine after a suspension."""
AWAKE_SECONDS = 30.0


class Octavo:
    """A server that ends with this process."""

    def __init__(self, setup: Setup) -> None:
        flags = ["--device", "cpu", "--cache-memory", str(setup.cache_gib)]
        flags += ["--keepalive-time", HOURS, "--keepalive-timeout", HOURS]
        flags += ["--heartbeat-timeout", HOURS, "--step-timeout", "0"]
        for name, value in setup.options.items():
            flags += [f"--{name}", value]
        stack = contextlib.ExitStack()
        atexit.register(stack.close)
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                self._address = stack.enter_context(local_server(setup.model, *flags))
        except typer.Exit:
            raise RuntimeError(BOXES.sub(" ", errors.getvalue()).strip()[-300:]) from None

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Send all requests at once."""
        return asyncio.run(self._run(requests))

    async def _run(self, requests: Sequence[Request]) -> Outcome:
        async with AsyncClient(self._address) as client:
            async with asyncio.timeout(AWAKE_SECONDS):
                while not await client.is_serving():  # noqa: ASYNC110 - must poll
                    await asyncio.sleep(0.1)
            began = time.perf_counter()
            whole = len(requests) > 1
            answers = await asyncio.gather(*(_answer(client, r, whole=whole) for r in requests))
            seconds = time.perf_counter() - began
        first = [at - began for _, at in answers]
        return Outcome(seconds, [tokens for tokens, _ in answers], first)


async def _answer(client: AsyncClient, request: Request, *, whole: bool) -> tuple[list[int], float]:
    """Return a request's output tokens, and the time of the first.

    With many requests, answers are not streamed, as in the other packages.
    """
    tokens: list[int] = []
    first: float | None = None
    stream = client.generate(
        request.prompt,
        max_tokens=request.output_tokens,
        ignore_eos=True,
        token_ids=True,
        final_only=whole,
        **GREEDY,
    )
    async for event in stream.events():
        if isinstance(event, Delta):
            first = first or time.perf_counter()
            tokens += event.token_ids
    return tokens, first or time.perf_counter()


def load(setup: Setup) -> Runner:
    """Start the server and wait until it serves."""
    return Octavo(setup)


if __name__ == "__main__":
    serve(load, ["octavo", "torch", "transformers"])
