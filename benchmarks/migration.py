"""Kill, hang and cut off engines under load; compare outputs with those of a run without faults.

    python -m benchmarks.migration [--streams 100] [--seconds 60] [--every 5]
        [--roles both both both] [--prompt-tokens 100]

Streams send request after request: greedy, seeded, penalised, constrained by a schema, several
outputs of different lengths, beam search, in float32. The first run has one engine, no faults, and
gives the expected outputs. Then one engine after another gets each kind of fault:

    kill    SIGKILL, and the engine is started again
    drain   SIGTERM without time to finish, and the engine is started again
    hang    SIGSTOP, and SIGCONT after a while
    cut     the connection drops all bytes, and carries new connections after a while

Each line gives the requests that were completed, refused before they began (no engine was up;
they were sent again), failed, or had a different token, text, end or count, and the migrations.
"""

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from benchmarks.fixture import EOS, Node, all_up, engine, make_model, router, serving
from octavo import AsyncClient, Completion, Error, Output, UnavailableError
from octavo.client.requests import GenerateOptions

SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 9}]},
    "minItems": 5,
}
KINDS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 0.8},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "three outputs": {"temperature": 0.9, "n": 3},
    "constrained": {"temperature": 1.0, "json_schema": SCHEMA, "n": 2},
    "beams": {"beam_width": 2},
}
HEARTBEAT_SECONDS = 2.0
MIGRATION = {
    "heartbeat_timeout": HEARTBEAT_SECONDS,
    "connect_timeout": HEARTBEAT_SECONDS,
    "max_migrations": 1000,
}


@dataclass(frozen=True)
class Ask:
    """A request, and its outputs in the run without faults."""

    kind: str
    prompt: list[int]
    options: GenerateOptions
    expected: tuple[tuple[object, ...], ...] = ()


@dataclass
class Outcome:
    """The outcome of a run's requests.

    Attributes:
        completed: Requests that were completed.
        tokens: Output tokens of the completed requests.
        refused: Refusals before any work; these requests were sent again.
        migrations: Migrations to another engine.
        different: Kinds of requests whose outputs differ from a run without faults.
        failures: Errors of the other requests.
    """

    completed: int = 0
    tokens: int = 0
    refused: int = 0
    migrations: int = 0
    different: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.completed} completed ({self.tokens} tokens), {self.refused} refused at first,"
            f" {len(self.failures)} failed, {len(self.different)} different,"
            f" {self.migrations} migrations"
        )

    def problems(self) -> list[str]:
        """Return failures and differences."""
        return self.failures + self.different


class Wire:
    """A TCP proxy that can drop all bytes while its connections stay open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._dropping = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.restore()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Drop all bytes from now on."""
        self._dropping = True

    def restore(self) -> None:
        """Accept new connections again; close those that lost bytes."""
        self._dropping = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if not self._dropping:
                    sink.write(data)
        except OSError:
            pass
        if not self._dropping:
            sink.transport.abort()


@dataclass
class Cluster:
    """A router, its engines, and the proxies between them."""

    router: Node
    engines: list[Node]
    wires: list[Wire]


@asynccontextmanager
async def cluster(model: str, roles: Sequence[str]) -> AsyncIterator[Cluster]:
    """Start a router, and an engine of each role; they copy blocks through the proxies."""
    nodes = [engine(model, max_num_seqs=64, swap_space=0.1, role=role) for role in roles]
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire(node.port)) for node in nodes]
        front = router([wire.address for wire in wires], migration_timeout=60, **MIGRATION)
        await stack.enter_async_context(serving(nodes, front))
        yield Cluster(front, nodes, wires)


async def kill(cluster: Cluster, victim: int, _: float) -> None:
    """Send SIGKILL and start the engine again."""
    await cluster.engines[victim].kill()
    await cluster.engines[victim].start()


async def drain(cluster: Cluster, victim: int, _: float) -> None:
    """Send SIGTERM and start the engine again."""
    await cluster.engines[victim].terminate()
    await cluster.engines[victim].start()


async def hang(cluster: Cluster, victim: int, seconds: float) -> None:
    """Stop the engine until the router notices."""
    cluster.engines[victim].signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    cluster.engines[victim].signal(signal.SIGCONT)


async def cut(cluster: Cluster, victim: int, seconds: float) -> None:
    """Drop all bytes until the router notices."""
    cluster.wires[victim].drop()
    await asyncio.sleep(seconds)
    cluster.wires[victim].restore()


Trouble = Callable[[Cluster, int, float], Coroutine[None, None, None]]
TROUBLES: dict[str, Trouble] = {"kill": kill, "drain": drain, "hang": hang, "cut": cut}


def make_asks(count: int, tokens: int, prompt_tokens: int = 100) -> list[Ask]:
    """Return requests of every kind in turn, with up to `tokens` output tokens."""
    draw = random.Random(0)
    asks = []
    for i, (kind, options) in zip(range(count), itertools.cycle(KINDS.items())):
        own: GenerateOptions = {"max_tokens": tokens // 4 if kind == "beams" else tokens}
        if "temperature" in options:
            own["seed"] = i
        prompt = [draw.randrange(EOS) for _ in range(draw.randrange(8, prompt_tokens))]
        asks.append(Ask(kind, prompt, {**options, **own, "token_ids": True}))
    return asks


async def ask(client: AsyncClient, request: Ask, outcome: Outcome) -> Completion:
    """Send a request until an engine accepts it; return its completion."""
    while True:
        stream = client.generate(request.prompt, timeout=300, **request.options)
        try:
            return await stream.complete()
        except UnavailableError:
            if stream.accepted is not None:
                raise
            outcome.refused += 1
            await asyncio.sleep(0.5)


async def stream(
    client: AsyncClient, asks: list[Ask], first: int, outcome: Outcome, over: asyncio.Event
) -> None:
    """Send one request after another, from the `first` on, and compare their outputs."""
    for i in itertools.count(first):
        request = asks[i % len(asks)]
        try:
            completion = await ask(client, request, outcome)
        except Error as error:
            outcome.failures.append(f"{request.kind}: {error}")
        else:
            outcome.completed += 1
            outcome.tokens += sum(len(output.token_ids) for output in completion.outputs)
            if tuple(map(shown, completion.outputs)) != request.expected:
                outcome.different.append(request.kind)
        if over.is_set():
            return


def shown(output: Output) -> tuple[object, ...]:
    """Return the parts of an output that must not depend on the engine."""
    return output.token_ids, output.text, output.reason, output.usage.output_tokens


async def settle(client: AsyncClient, asks: list[Ask]) -> list[Ask]:
    """Return the requests with their outputs in the run without faults.

    A row's result in Octavo's kernels does not depend on the other rows, so every output must
    repeat, even if two tokens are almost equally likely.
    """
    completions = await asyncio.gather(*(ask(client, request, Outcome()) for request in asks))
    return [
        replace(request, expected=tuple(map(shown, found.outputs)))
        for request, found in zip(asks, completions, strict=True)
    ]


async def run(
    cluster: Cluster, asks: list[Ask], trouble: Trouble, *, streams: int, times: int, every: float
) -> Outcome:
    """Run `streams` streams while engines suffer a fault `times` times."""
    outcome, over = Outcome(), asyncio.Event()

    def migrations() -> int:
        return int(cluster.router.metrics().value("octavo_router_migrations_total"))

    before = migrations()

    async def trouble_engines() -> None:
        lasts = max(every, 2.5 * HEARTBEAT_SECONDS)
        sound = [asyncio.Lock() for _ in cluster.engines]

        async def strike(victim: int) -> None:
            async with sound[victim]:  # it may not have recovered yet
                await trouble(cluster, victim, lasts)

        async with asyncio.TaskGroup() as group:
            for number in range(times):
                await asyncio.sleep(every)
                group.create_task(strike(number % len(cluster.engines)))
        over.set()

    async with AsyncClient(cluster.router.address) as client:
        streaming = (stream(client, asks, i, outcome, over) for i in range(streams))
        await asyncio.gather(trouble_engines(), *streaming)
    outcome.migrations = migrations() - before
    return outcome


async def measure(
    streams: int, seconds: float, every: float, roles: list[str], prompt_tokens: int
) -> bool:
    """Run every kind of fault and print the outcome; return True if nothing failed."""
    well = True
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        asks = make_asks(2 * streams, 200, prompt_tokens)
        async with cluster(model, ["both"]) as alone, AsyncClient(alone.router.address) as client:
            asks = await settle(client, asks)
        async with cluster(model, roles) as served:
            print(f"{len(asks)} requests, {streams} streams, engines: {', '.join(roles)}")
            for name, trouble in TROUBLES.items():
                times = round(seconds / every)
                outcome = await run(
                    served, asks, trouble, streams=streams, times=times, every=every
                )
                print(f"{name:6} {times:4} times: {outcome}", flush=True)
                for what in outcome.problems()[:5]:
                    print(f"       {what}")
                well &= not outcome.problems()
                await all_up(served.router, len(roles))
    return well


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--roles", nargs="+", default=["both", "both", "both"])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    sys.exit(not asyncio.run(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
