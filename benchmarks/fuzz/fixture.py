"""Start a router and an engine to fuzz, and measure the resources that they hold."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import fixture
from benchmarks.fuzz.calls import FaultError
from octavo import AsyncClient

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SETTLE_SECONDS = 60.0
PROMPT = "a request as any other: "
TOKENS = 40
NOT_OURS = re.compile(r"[EWI]\d{4} \d|\s*Loading weights|.*\rLoading weights")
"""Harmless log lines: gRPC's about clients, and transformers' about progress."""
PATIENCE = 30.0
"""Maximum seconds of an ordinary request while the servers are busy."""


@dataclass(frozen=True)
class Levels:
    """The resources that a process holds."""

    pid: int
    rss: int
    fds: int
    tasks: int
    sessions: int
    requests: int
    blocks: int

    def left_over(self, before: "Levels") -> list[str]:
        """Return a line for each resource that has grown."""
        names = ("fds", "tasks", "sessions", "requests", "blocks")
        return [
            f"{getattr(self, name)} {name}, not {getattr(before, name)}"
            for name in names
            if getattr(self, name) > getattr(before, name)
        ]


@dataclass(frozen=True)
class Service:
    """The router, the engine, their log folder, and the ordinary request's expected answer."""

    router: fixture.Node
    engine: fixture.Node
    logs: Path
    expected: str

    def levels(self) -> dict[str, Levels]:
        """Return the resources that each process holds now."""
        # Counted before reading the metrics, which takes a connection.
        router, engine = (psutil.Process(node.pid) for node in (self.router, self.engine))
        files = {process: _own_files(process) for process in (router, engine)}
        of_router, of_engine = self.router.metrics().value, self.engine.metrics().value
        blocks = sum(
            of_engine(f"octavo_engine_{name}", state="used") for name in ("blocks", "swap_blocks")
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
                blocks=int(blocks),
            ),
        }

    async def settled(self, before: dict[str, Levels]) -> dict[str, Levels]:
        """Wait until no resource exceeds its level `before`; return the levels.

        Raises:
            FaultError: A resource stays, or a process was replaced.
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
                raise FaultError(f"left behind: {left}\n{self._open_files()}")
            await asyncio.sleep(0.1)
        for name, levels in now.items():
            if levels.pid != before[name].pid:
                raise FaultError(f"the {name} is not the process that it was")
        return now

    def _open_files(self) -> str:
        """Return the processes' open files and connections as text."""
        lines = []
        for node in (self.router, self.engine):
            files = Path(f"/proc/{node.pid}/fd").iterdir()
            lines += [f"{node.pid}: {' '.join(sorted(str(file.readlink()) for file in files))}"]
            connections = psutil.Process(node.pid).net_connections()
            lines += [f"  {c.fd}: {c.laddr} {c.raddr} {c.status}" for c in connections]
        return "\n".join(lines)

    async def ask(self) -> float:
        """Send an ordinary request; return its seconds.

        Raises:
            FaultError: Its output is not the expected one.
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
        """Return the processes' log lines; there are none unless something is wrong."""
        lines = [
            f"{path.stem}: {line}"
            for path in sorted(self.logs.glob("*.log"))
            for line in path.read_text().splitlines()
            if line and not NOT_OURS.match(line)
        ]
        return "\n".join(lines)


@asynccontextmanager
async def service(directory: Path) -> AsyncIterator[Service]:
    """Serve the tiny model with little memory for K and V."""
    model = fixture.make_model(directory / "model")
    (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    engine = fixture.engine(model, num_blocks=256, swap_space=0.002)
    router = fixture.router([engine.address], write_timeout=5)
    engine.errors, router.errors = directory / "engine.log", directory / "router.log"
    async with fixture.serving([engine], router) as client:
        expected = await _text(client)
        await client.close()
        yield Service(router, engine, directory, expected)


def _own_files(process: psutil.Process) -> int:
    """Count a process' open files except the connections from this process."""
    ours = {_plain(connection.laddr) for connection in psutil.Process().net_connections()}
    theirs = process.net_connections()
    return process.num_fds() - sum(_plain(connection.raddr) in ours for connection in theirs)


def _plain(address: tuple[str, int] | tuple[()]) -> tuple[str, int] | tuple[()]:
    """Unwrap an IPv4-mapped IPv6 address."""
    return (address[0].removeprefix("::ffff:"), address[1]) if address else ()


async def _text(client: AsyncClient) -> str:
    return await client.generate(
        PROMPT, temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, timeout=PATIENCE, priority=100
    ).text()
