"""vLLM's and OpenVINO's own prompt look-up, with the prompts of `benchmarks.speculation`."""

from collections.abc import Mapping, Sequence

from benchmarks.peers import model_files, registry
from benchmarks.peers.environments import provide
from benchmarks.peers.registry import Peer
from benchmarks.peers.worker_process import WorkerProcess, worker_command, worker_variables
from benchmarks.peers.workers.protocol import Request, Setup

PATIENCE = 900.0
CACHE_GIB = 1.0
MODES = ("off", "look-up")

Asked = Mapping[str, Sequence[tuple[list[int], int]]]
"""By kind of work: prompts, and how many tokens to generate for each."""


def measure_peers(names: Sequence[str], asked: Asked, drafted: int, threads: int) -> list[str]:
    """Return a line for each peer and kind of work: tokens/s without drafts and with its look-up.

    Each peer is started twice, as the look-up is a setting of its start. Requests run one at a
    time, greedily and to the given lengths; the first request of a start is sent twice, to warm up.

    Args:
        names: of peers, as in `registry.PEERS`.
        asked: what to generate.
        drafted: most drafted tokens in a step.
        threads: to compute with.

    Raises:
        ValueError: no peer has a name.
        InstallError, WorkerError: a peer cannot be installed, or failed.
    """
    lines = []
    for peer in registry.choose(",".join(names)):
        rates = {mode: _rates(peer, asked, drafted * (mode != "off"), threads) for mode in MODES}
        for kind in asked:
            off, on = (rates[mode][kind] for mode in MODES)
            lines.append(f"{kind:<9}{peer.title:<24}{off:9.1f}{on:9.1f}{on / off:7.2f}x")
    return lines


def _rates(peer: Peer, asked: Asked, drafted: int, threads: int) -> dict[str, float]:
    """Return a peer's tokens/s by kind of work."""
    assert peer.environment is not None
    folder = registry.default_folder()
    python = provide(peer.environment, folder)
    model = model_files.choose(model_files.DEMO).provide(peer.form, folder)
    command, variables = worker_command(python, peer.worker), worker_variables(threads)
    options = dict(peer.options) | ({"drafted": str(drafted)} if drafted else {})
    rates = {}
    with WorkerProcess(command, variables, folder / f"{peer.name}.log", PATIENCE) as worker:
        worker.load(Setup(str(model), threads, CACHE_GIB, options))
        worker.run([Request(*next(iter(asked.values()))[0])])
        for kind, prompts in asked.items():
            tokens = sum(count for _, count in prompts)
            seconds = sum(worker.run([Request(*prompt)]).seconds for prompt in prompts)
            rates[kind] = tokens / seconds
            print(f"{peer.title}, {drafted} drafted tokens: {kind} {rates[kind]:.1f}", flush=True)
    return rates
