"""AMD PACE's server over HTTP, its only way of continuous batching."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from .protocol import Outcome, Request, Runner, Setup, serve

NEEDS = frozenset({"avx512f", "avx512_bf16"})
"""Linux's names of the CPU features that its kernels need."""
START_SECONDS = 300.0

Post = Callable[..., AbstractAsyncContextManager[Any]]
"""An `aiohttp.ClientSession`'s `post`."""


def command(setup: Setup, port: int, engine_port: int) -> tuple[str, ...]:
    """Return the command of its server, as in its README, with a thread per core."""
    return (
        *(sys.executable, "-m", "pace.server.launcher", "--server_model", setup.model),
        *("--kv_cache_type", "SLAB_POOL", "--serve_type", "continuous_batch"),
        *("--kv_cache_memory_gb", str(setup.cache_gib)),
        *("--numa_physcpubind", f"0-{setup.threads - 1}", "--numa_membind", "0"),
        *("--router_host", "127.0.0.1", "--router_port", str(port)),
        *("--server_host", "127.0.0.1", "--server_port", str(engine_port)),
    )


class Pace:
    """A running server. It ends with this process's session."""

    def __init__(self, setup: Setup) -> None:
        _check_machine()
        self._model = setup.model
        port, engine_port = _free_ports(2)
        self._url = f"http://127.0.0.1:{port}/v1"
        self._server = subprocess.Popen(command(setup, port, engine_port), stdin=subprocess.DEVNULL)
        asyncio.run(self._wait_ready())

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Send all requests at once, each on its own connection; read their tokens."""
        return asyncio.run(self._run(requests))

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if (code := self._server.poll()) is not None:
                    raise RuntimeError(f"pace-server ended with code {code}")
                try:
                    async with session.get(f"{self._url}/health") as response:
                        if response.ok:
                            return
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.2)
        raise RuntimeError(f"pace-server is not ready within {START_SECONDS:.0f} s")

    async def _run(self, requests: Sequence[Request]) -> Outcome:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            began = time.perf_counter()
            answers = await asyncio.gather(
                *(self._ask(session.post, one, began) for one in requests)
            )
            seconds = time.perf_counter() - began
        outputs = [tokens for tokens, _ in answers]
        return Outcome(seconds, outputs, [first for _, first in answers], "over HTTP")

    async def _ask(self, post: Post, request: Request, began: float) -> tuple[list[int], float]:
        """Return a request's tokens, and the seconds from `began` to the first.

        Its MLPerf mode streams token ids, one per line, instead of text.
        """
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "mlperf_mode": True,
        }
        tokens: list[int] = []
        first = 0.0
        async with post(f"{self._url}/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                text = line.decode().strip()
                if not text or text == "[DONE]":
                    continue
                if not tokens:
                    first = time.perf_counter() - began
                tokens.append(int(text))
        return tokens, first


def _check_machine() -> None:
    """Check the CPU's features: without them the server dies of an illegal instruction.

    Raises:
        RuntimeError: The CPU lacks a feature.
    """
    features = set(Path("/proc/cpuinfo").read_text().split())
    if lacking := NEEDS - features:
        raise RuntimeError(f"this CPU lacks {', '.join(sorted(lacking))}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def load(setup: Setup) -> Runner:
    """Start the server and wait until it has loaded the model."""
    return Pace(setup)


if __name__ == "__main__":
    serve(load, ["amd-pace", "torch"])
