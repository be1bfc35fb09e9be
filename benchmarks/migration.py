"""Kills, hangs and cuts off engines under load, and holds every output to the undisturbed one.

    python -m benchmarks.migration [--streams 100] [--seconds 60] [--every 5] [--engines 3]

Streams ask again and again: greedy, seeded, penalised, several outputs of unlike
length, beam search, in float32. First once with nothing happening, which gives
what each must come to. Then, for each kind of trouble, while one engine after
another has it:

    kill    SIGKILL, and the engine started again
    drain   SIGTERM, with no time to finish, and the engine started again
    hang    SIGSTOP, and SIGCONT after a while
    cut     the link swallows all bytes, and carries new connections after a while

The last lines say how many requests were completed, refused before they began
(and asked again: no engine was up that moment), failed or came out different in
any token, word, end or count, and how often requests moved.
"""

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fleet import EOS, Node, Wire, all_up, engine, make_model, router
from benchmarks.metrics import Metrics
from benchmarks.rounding import Judge
from octavo import AsyncClient, Completion, Error, Output, UnavailableError
from octavo.client.requests import GenerateOptions
from octavo.common.ports import free_port

KINDS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"temperature": 0.8},
    "truncated": {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "three outputs": {"temperature": 0.9, "n": 3},
    "beams": {"beam_width": 2},
}
HEARTBEAT_SECONDS = 2.0


@dataclass(frozen=True)
class Ask:
    """A request, and what it comes to when nothing happens."""

    kind: str
    prompt: list[int]
    options: GenerateOptions
    expected: tuple[tuple[object, ...], ...] = ()


@dataclass
class Outcome:
    """What became of a run's requests.

    Attributes:
        completed: that came to their end.
        tokens: that these had.
        refused: before anything was done for them; they were asked again.
        moves: from one engine to another.
        different: the kinds of those whose outputs were not the undisturbed ones.
        failures: what became of the others.
    """

    completed: int = 0
    tokens: int = 0
    refused: int = 0
    moves: int = 0
    different: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Cluster:
    """A router over engines, with a wire between it and each."""

    router: Node
    engines: list[Node]
    wires: list[Wire]
    metrics_port: int

    def moves(self) -> int:
        """How often requests have moved."""
        return int(Metrics(self.metrics_port).value("octavo_router_moves_total"))


@asynccontextmanager
async def cluster(model: str, engines: int) -> AsyncIterator[Cluster]:
    """Starts everything and ends it."""
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        nodes = [await start(engine(model, max_num_seqs=64)) for _ in range(engines)]
        wires = [await Wire(node.port).start() for node in nodes]
        for wire in wires:
            stack.push_async_callback(wire.close)
        front = router(
            [wire.address for wire in wires],
            heartbeat_timeout=HEARTBEAT_SECONDS,
            connect_timeout=HEARTBEAT_SECONDS,
            max_moves=1000,
            failover_timeout=60,
            metrics_port=(metrics_port := free_port()),
        )
        served = Cluster(await start(front), nodes, wires, metrics_port)
        await all_up(served.router, engines)
        yield served


# Trouble, with one engine after another.


async def kill(cluster: Cluster, victim: int, _: float) -> None:
    """SIGKILL, and started again."""
    await cluster.engines[victim].kill()
    await cluster.engines[victim].start()


async def drain(cluster: Cluster, victim: int, _: float) -> None:
    """SIGTERM, with no time for what runs, and started again."""
    await cluster.engines[victim].terminate()
    await cluster.engines[victim].start()


async def hang(cluster: Cluster, victim: int, seconds: float) -> None:
    """SIGSTOP, for long enough to be noticed."""
    cluster.engines[victim].signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    cluster.engines[victim].signal(signal.SIGCONT)


async def cut(cluster: Cluster, victim: int, seconds: float) -> None:
    """The link carries nothing, for long enough to be noticed."""
    cluster.wires[victim].drop()
    await asyncio.sleep(seconds)
    cluster.wires[victim].restore()


Trouble = Callable[[Cluster, int, float], Coroutine[None, None, None]]
TROUBLES: dict[str, Trouble] = {"kill": kill, "drain": drain, "hang": hang, "cut": cut}


# Load.


def make_asks(count: int, tokens: int) -> list[Ask]:
    """Requests of every kind in turn, for outputs of up to `tokens` tokens."""
    draw = random.Random(0)
    asks = []
    for i, (kind, options) in zip(range(count), itertools.cycle(KINDS.items())):
        own: GenerateOptions = {"max_tokens": tokens // 4 if kind == "beams" else tokens}
        if "temperature" in options:
            own["seed"] = i
        prompt = [draw.randrange(EOS) for _ in range(draw.randrange(8, 100))]
        asks.append(Ask(kind, prompt, {**options, **own, "token_ids": True}))
    return asks


async def ask(client: AsyncClient, request: Ask, outcome: Outcome) -> Completion:
    """Has a request served; asks again where it was refused, as no engine was up that moment."""
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
    """Has one request served after another, from the `first` on, and compares what comes."""
    for i in itertools.count(first):
        request = asks[i % len(asks)]
        try:
            found = await ask(client, request, outcome)
        except Error as error:
            outcome.failures.append(f"{request.kind}: {error}")
        else:
            outcome.completed += 1
            outcome.tokens += sum(len(output.token_ids) for output in found.outputs)
            if tuple(map(shown, found.outputs)) != request.expected:
                outcome.different.append(request.kind)
        if over.is_set():
            return


def shown(output: Output) -> tuple[object, ...]:
    """All of an output that must not depend on where it was made."""
    return output.token_ids, output.text, output.reason, output.usage.output_tokens


async def settle(client: AsyncClient, asks: list[Ask], model: str) -> list[Ask]:
    """Finds out what requests come to; drops those that rounding may decide."""
    judge = Judge(model)
    completions = await asyncio.gather(*(ask(client, request, Outcome()) for request in asks))
    return [
        Ask(request.kind, request.prompt, request.options, tuple(map(shown, found.outputs)))
        for request, found in zip(asks, completions, strict=True)
        if judge.is_decided(request.prompt, request.options, found)
    ]


async def run(
    cluster: Cluster, asks: list[Ask], trouble: Trouble, *, streams: int, times: int, every: float
) -> Outcome:
    """Keeps `streams` requests going while engines have trouble `times` times."""
    outcome = Outcome()
    before = cluster.moves()
    over = asyncio.Event()

    async def trouble_engines() -> None:
        lasts = max(every, 2.5 * HEARTBEAT_SECONDS)
        victims = itertools.cycle(range(len(cluster.engines)))
        sound = [asyncio.Lock() for _ in cluster.engines]

        async def strike(victim: int) -> None:
            async with sound[victim]:  # it may have been slow to come back
                await trouble(cluster, victim, lasts)

        async with asyncio.TaskGroup() as group:
            for victim in itertools.islice(victims, times):
                await asyncio.sleep(every)
                group.create_task(strike(victim))
        over.set()

    async with AsyncClient(cluster.router.address) as client:
        streaming = (stream(client, asks, i, outcome, over) for i in range(streams))
        await asyncio.gather(trouble_engines(), *streaming)
    outcome.moves = cluster.moves() - before
    return outcome


async def measure(streams: int, seconds: float, every: float, engines: int) -> bool:
    """Runs every kind of trouble and prints what came of it; returns whether all was well."""
    well = True
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        async with cluster(model, engines) as served, AsyncClient(served.router.address) as client:
            asks = await settle(client, make_asks(2 * streams, tokens=200), model)
            print(f"{len(asks)} requests, {streams} streams, {engines} engines")
            for name, trouble in TROUBLES.items():
                times = round(seconds / every)
                outcome = await run(
                    served, asks, trouble, streams=streams, times=times, every=every
                )
                print(
                    f"{name:6} {times:4} times: {outcome.completed} completed "
                    f"({outcome.tokens} tokens), {outcome.refused} refused at first, "
                    f"{len(outcome.failures)} failed, "
                    f"{len(outcome.different)} different, {outcome.moves} moves",
                    flush=True,
                )
                for what in (outcome.failures + outcome.different)[:5]:
                    print(f"       {what}")
                well &= not outcome.failures and not outcome.different
                await all_up(served.router, engines)
    return well


def main() -> None:
    """Parses the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=5)
    parser.add_argument("--engines", type=int, default=3)
    arguments = parser.parse_args()
    sys.exit(not asyncio.run(measure(**vars(arguments))))


if __name__ == "__main__":
    main()
