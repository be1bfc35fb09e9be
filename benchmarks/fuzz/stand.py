"""A router and an engine to be rude to, and what shows whether it left a trace."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import fleet
from benchmarks.fuzz.calls import FaultError
from benchmarks.metrics import Metrics
from octavo import AsyncClient
from octavo.common.ports import free_port

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SETTLE_SECONDS = 60.0
PROMPT = "a request as any other: "
TOKENS = 40
NOT_OURS = re.compile(r"[EWI]\d{4} \d|\s*Loading weights|.*\rLoading weights")
"""What gRPC says of clients, and transformers of its progress."""
PATIENCE = 30.0
"""Seconds that an ordinary request may take while the servers are kept busy."""


@dataclass(frozen=True)
class Levels:
    """What a process holds, as its metrics say."""

    pid: int
    rss: int
    fds: int
    tasks: int
    sessions: int
    requests: int
    blocks: int

    def left_over(self, before: "Levels") -> list[str]:
        """Says what is held that was not held before."""
        names = ("fds", "tasks", "sessions", "requests", "blocks")
        return [
            f"{getattr(self, name)} {name}, not {getattr(before, name)}"
            for name in names
            if getattr(self, name) > getattr(before, name)
        ]


@dataclass(frozen=True)
class Stand:
    """The processes and what is known of them."""

    router: fleet.Node
    engine: fleet.Node
    router_metrics: int
    engine_metrics: int
    errors: Path
    expected: str

    def levels(self) -> dict[str, Levels]:
        """What each process holds now."""
        # Before the metrics are asked for, which takes a connection.
        router, engine = (psutil.Process(node.pid) for node in (self.router, self.engine))
        files = {process: _files_of_its_own(process) for process in (router, engine)}
        of_router, of_engine = (
            Metrics(port).value for port in (self.router_metrics, self.engine_metrics)
        )
        return {
            "router": Levels(
                pid=router.pid,
                rss=router.memory_info().rss,
                fds=files[router],
                tasks=int(of_router("octavo_tasks")),
                sessions=0,
                requests=int(of_router("octavo_router_requests_in_flight")),
                blocks=0,
            ),
            "engine": Levels(
                pid=engine.pid,
                rss=engine.memory_info().rss,
                fds=files[engine],
                tasks=int(of_engine("octavo_tasks")),
                sessions=int(of_engine("octavo_engine_sessions")),
                requests=int(of_engine("octavo_engine_groups")),
                blocks=int(
                    of_engine("octavo_engine_blocks", state="used")
                    + of_engine("octavo_engine_swap_blocks", state="used")
                ),
            ),
        }

    async def settled(self, before: dict[str, Levels]) -> dict[str, Levels]:
        """Waits until nothing is held that was not held `before`.

        Raises:
            FaultError: something stays, or a process was replaced.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                now = await asyncio.to_thread(self.levels)
            except (psutil.Error, OSError) as error:
                raise FaultError(f"a process is gone: {error!r}") from error
            left = {name: now[name].left_over(before[name]) for name in now}
            if not any(left.values()):
                break
            if time.monotonic() > deadline:
                raise FaultError(f"left behind: {left}\n{self._files()}")
            await asyncio.sleep(0.1)
        for name, levels in now.items():
            if levels.pid != before[name].pid:
                raise FaultError(f"the {name} is not the process that it was")
        return now

    def _files(self) -> str:
        """What the processes have open, for a person."""
        lines = []
        for node in (self.router, self.engine):
            files = Path(f"/proc/{node.pid}/fd").iterdir()
            lines += [f"{node.pid}: {' '.join(sorted(str(file.readlink()) for file in files))}"]
            connections = psutil.Process(node.pid).net_connections()
            lines += [f"  {c.fd}: {c.laddr} {c.raddr} {c.status}" for c in connections]
        return "\n".join(lines)

    async def ask(self) -> float:
        """Makes an ordinary request; returns the seconds that it took.

        Raises:
            FaultError: it did not get the output that it should.
        """
        began = time.monotonic()
        try:
            async with AsyncClient(self.router.address) as client:
                text = await _text(client)
        except Exception as error:
            raise FaultError(f"an ordinary request failed: {error!r}") from error
        if text != self.expected:
            raise FaultError(f"an ordinary request got {text!r}, not {self.expected!r}")
        return time.monotonic() - began

    def logged(self) -> str:
        """What the processes said on stderr: nothing, unless something is wrong."""
        lines = [
            f"{path.stem}: {line}"
            for path in sorted(self.errors.glob("*.log"))
            for line in path.read_text().splitlines()
            if line and not NOT_OURS.match(line)
        ]
        return "\n".join(lines)


@asynccontextmanager
async def stand(directory: Path) -> AsyncIterator[Stand]:
    """Starts a router and an engine of the tiny model, with little memory for K and V."""
    model = fleet.make_model(directory / "model")
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    engine = fleet.engine(
        model, metrics_port=(engine_metrics := free_port()), num_blocks=256, swap_space=0.002
    )
    router = fleet.router(
        [engine.address], metrics_port=(router_metrics := free_port()), write_timeout=5
    )
    async with AsyncExitStack() as stack:
        for name, node in (("engine", engine), ("router", router)):
            node.errors = directory / f"{name}.log"
            stack.push_async_callback(node.close)
            await node.start()
        await fleet.all_up(router, 1)
        async with AsyncClient(router.address) as client:
            expected = await _text(client)
        yield Stand(router, engine, router_metrics, engine_metrics, directory, expected)


def _files_of_its_own(process: psutil.Process) -> int:
    """How many files a process has open, but for connections that this process holds open."""
    ours = {_plain(connection.laddr) for connection in psutil.Process().net_connections()}
    theirs = process.net_connections()
    return process.num_fds() - sum(_plain(connection.raddr) in ours for connection in theirs)


def _plain(address: tuple[str, int] | tuple[()]) -> tuple[str, int] | tuple[()]:
    """An address that is not IPv4 in IPv6's clothes."""
    return (address[0].removeprefix("::ffff:"), address[1]) if address else ()


async def _text(client: AsyncClient) -> str:
    return await client.generate(
        PROMPT, temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, timeout=PATIENCE, priority=100
    ).text()
