"""Measure every peer once per round, one at a time in a rotating order."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import psutil

from benchmarks.peers import environments, workloads
from benchmarks.peers.environments import InstallError
from benchmarks.peers.model_files import Model
from benchmarks.peers.registry import Peer
from benchmarks.peers.results import Result, Sample
from benchmarks.peers.worker_process import (
    WorkerError,
    WorkerProcess,
    worker_command,
    worker_variables,
)
from benchmarks.peers.workers.protocol import Setup
from benchmarks.peers.workloads import Workload
from octavo.common.models.errors import ModelError

CACHE_GIB = 2.0
"""GiB of KV cache per peer: large shapes need 1.5 for the mix; AMD PACE fails if it runs out."""
ROOM_BYTES = 6 << 30
"""Free memory that loading a peer needs; other peers are ended to get it."""
SINGLE_REPEATS = 3
"""Repetitions per round of the single request, which is short."""
WARM_UP = 1_000_000
"""Seed of warm-up rounds: no measured round has the same prompts."""
SETTLE_SECONDS = 5.0
"""Pause after the warm-up, for work that a peer defers until it is idle."""
PATIENCE = 1_800.0

T = TypeVar("T")
Say = Callable[[str], None]
"""Called with a line of progress."""


class Fleet:
    """The loaded peers; all but the running one are stopped.

    Args:
        model: Model of all peers.
        folder: Folder for logs, environments and model files.
        threads: Compute threads per peer.
        requests: Number of requests of the mix.
        rebuild: Whether to create environments again.
        say: Called with each line of progress.
    """

    def __init__(
        self,
        model: Model,
        folder: Path,
        threads: int,
        requests: int,
        *,
        rebuild: bool,
        say: Say,
    ) -> None:
        self._model = model
        self._folder = folder
        self._threads = threads
        self._requests = requests
        self._rebuild = rebuild
        self._say = say
        self._provided: dict[str, tuple[Path, Path]] = {}
        self._loaded: dict[str, WorkerProcess] = {}

    def provide(self, peer: Peer) -> None:
        """Install a peer and fetch its model if they are missing.

        Raises:
            InstallError, ModelError: Installation or download failed.
        """
        if peer.environment is None:
            python = Path(sys.executable)
        else:
            python = environments.provide(peer.environment, self._folder, rebuild=self._rebuild)
        self._provided[peer.name] = python, self._model.provide(peer.form, self._folder)

    def run(self, peer: Peer, number: int, result: Result) -> None:
        """Run a round's workloads with the peer loaded and warm; record the samples.

        Raises:
            WorkerError: The peer failed and was ended.
        """
        try:
            worker = self._loaded.get(peer.name)
            if worker is None:
                worker = self._load(peer, result)
                self._warm_up(worker, peer)
            else:
                worker.resume()
            for workload in self._workloads(number):
                self._say(f"{peer.title}: {workload.title}")
                outcome = worker.run(workload.requests)
                result.samples.append(Sample.of(number, workload, outcome))
            worker.pause()
        except WorkerError:
            self._end(peer.name)
            raise

    def _load(self, peer: Peer, result: Result) -> WorkerProcess:
        python, model = self._provided[peer.name]
        while self._loaded and psutil.virtual_memory().available < ROOM_BYTES:
            self._end(next(iter(self._loaded)))
        self._say(f"{peer.title}: loading")
        more = () if peer.checkout is None else (peer.checkout,)
        variables = worker_variables(self._threads, *more)
        command = worker_command(python, peer.worker)
        began = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{peer.name}.log"
        worker = WorkerProcess(command, variables, log, PATIENCE, directory=peer.checkout)
        self._loaded[peer.name] = worker
        setup = Setup(str(model), self._threads, CACHE_GIB, peer.options)
        result.versions = worker.load(setup)
        result.load_seconds.append(time.monotonic() - began)
        return worker

    def _warm_up(self, worker: WorkerProcess, peer: Peer) -> None:
        self._say(f"{peer.title}: warming up")
        worker.run(self._single(WARM_UP).requests)
        worker.run(self._mixed(WARM_UP).requests)
        time.sleep(SETTLE_SECONDS)

    def _workloads(self, number: int) -> list[Workload]:
        singles = [self._single(number * SINGLE_REPEATS + i) for i in range(SINGLE_REPEATS)]
        return [*singles, self._mixed(number)]

    def _single(self, seed: int) -> Workload:
        return workloads.single(seed, self._model.vocabulary)

    def _mixed(self, seed: int) -> Workload:
        return workloads.mixed(seed, self._requests, self._model.vocabulary)

    def _end(self, name: str) -> None:
        worker = self._loaded.pop(name, None)
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self._loaded.values():
                stack.callback(worker.close)


def measure(fleet: Fleet, peers: Sequence[Peer], rounds: int, say: Say) -> list[Result]:
    """Run all rounds, or until the user interrupts them.

    Args:
        fleet: Runs the peers.
        peers: Peers to measure.
        rounds: Number of rounds.
        say: Called with each line of progress.

    Returns:
        A result for each peer. A failed peer has the reason in `failure`, and keeps its earlier
        samples.
    """
    results = {peer.name: Result(peer.name, peer.title, peer.weights) for peer in peers}
    able = []
    for peer in peers:
        say(f"{peer.title}: installing")
        try:
            fleet.provide(peer)
        except (InstallError, ModelError) as error:
            results[peer.name].failure = str(error)
        else:
            able.append(peer)
    try:
        for number in range(rounds):
            for peer in turned(able, number):
                _run(fleet, peer, number, results[peer.name])
    except KeyboardInterrupt:
        say("interrupted; the tables have what was measured until now")
    return list(results.values())


def _run(fleet: Fleet, peer: Peer, number: int, result: Result) -> None:
    if result.failure:
        return
    try:
        fleet.run(peer, number, result)
    except WorkerError as error:
        result.failure = str(error)


def turned(peers: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: each begins with another peer."""
    start = number % len(peers) if peers else 0
    return [*peers[start:], *peers[:start]]
