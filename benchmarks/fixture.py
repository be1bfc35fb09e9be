"""Start engines and routers on this machine, each in its own process.

Processes are forked from one that has imported everything, and the model is tiny and random. So an
engine starts in well under a second of CPU time, and only the service around it is measured.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import grpc.aio
import psutil
import torch
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.metrics import Metrics
from octavo import AsyncClient
from octavo.cli.running import settle
from octavo.common import logging
from octavo.common.ports import free_port
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import hash_key

VOCABULARY = 257
EOS = 256
CONTEXT = 2048
PRELOAD = [
    "octavo.engine.server",
    "octavo.router.server",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "benchmarks.freeze_imports",
]
READY_SECONDS = 120.0
STOP_SECONDS = 10.0

Serve = Callable[[int, Connection], None]
"""Main function of a process: gets its port, and a pipe for HOST:PORT once it listens."""


def make_model(directory: Path, seed: int = 0) -> str:
    """Save a two-layer model with random weights and a byte tokenizer; return the directory."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def save_tokenizer(directory: Path) -> None:
    """Save a byte tokenizer: VOCABULARY tokens, with EOS as the last one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def _own_channel(address: str, *, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    channel_options = [*options, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=channel_options)


class OwnConnection(AsyncClient):
    """A client with its own connection; by default clients of an address share one per process."""

    _insecure_channel = staticmethod(_own_channel)


def write_tenants(file: Path, weights: dict[str, float]) -> Path:
    """Write a tenants' file: each tenant's key is its name; return the file."""
    file.write_text(
        "".join(
            f'[{name}]\nkeys = ["{hash_key(name)}"]\nweight = {weight}\n'
            for name, weight in weights.items()
        )
    )
    return file


class Node:
    """One engine or router: start, kill or stop it, and start it again at the same port.

    Args:
        serve: The process's main function.
        metrics_port: Its metrics port; 0 for none.
        has_children: Whether it starts processes, which daemons may not do.

    Attributes:
        port: The port that it listens on.
        address: Its HOST:PORT.
        errors: The file for its stderr; None: this process' stderr.
    """

    def __init__(self, serve: Serve, metrics_port: int = 0, *, has_children: bool = False) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._serve = serve
        self._has_children = has_children
        self.errors: Path | None = None
        self.metrics_port = metrics_port
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    async def start(self, seconds: float = READY_SECONDS) -> Self:
        """Start the process and wait until it listens.

        Raises:
            TimeoutError: It did not listen within `seconds`.
            EOFError: It ended instead, and printed why.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (self._serve, self.errors, self.port, theirs)
        self._process = self._context.Process(
            target=_run, args=arguments, daemon=not self._has_children
        )
        self._process.start()
        theirs.close()
        if not await asyncio.to_thread(ours.poll, seconds):
            raise TimeoutError(f"{self.address} was not ready in {seconds:g} s")
        ours.recv()
        return self

    @property
    def pid(self) -> int | None:
        """The process' id; None if it does not run."""
        return self._process.pid if self._process.is_alive() else None

    @property
    def exitcode(self) -> int | None:
        """The exit code as in multiprocessing; None while the process runs."""
        return self._process.exitcode

    def metrics(self) -> Metrics:
        """Read its metrics."""
        return Metrics(self.metrics_port)

    def rss(self) -> int:
        """Return the process' resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    async def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)

    async def terminate(self) -> None:
        """Send SIGTERM and wait for the end."""
        self.signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.join)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal if it runs."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    async def close(self) -> None:
        """End the process in any state."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.join, STOP_SECONDS)
        await self.kill()


def engine(
    model: str,
    *,
    threads: int | None = 1,
    sabotage: Callable[[], None] | None = None,
    **settings: Any,  # noqa: ANN401
) -> Node:
    """Return an engine of `model` in float32.

    By default it does not trace the model, to start sooner.

    Args:
        model: The model's directory.
        threads: Number of compute threads; None: the engine's default.
        sabotage: Called in the engine's process once it is ready, to make it fail later.
        settings: More of EngineSettings.
    """
    defaults = {
        "model": model,
        "compile": "off",
        "served_model_name": "tiny",
        "dtype": "float32",
        "num_blocks": 1024,
        "max_model_len": CONTEXT,
        "swap_space": 0,
        "metrics_port": free_port(),
        "drain_timeout": 0.0,
        "log_level": "error",
    }
    merged = defaults | settings
    return Node(partial(_run_engine, merged, threads, sabotage), merged["metrics_port"])


def router(engines: Iterable[str], **settings: Any) -> Node:  # noqa: ANN401
    """Return a router over engines by address; `settings` are more of RouterSettings."""
    defaults = {"metrics_port": free_port(), "drain_timeout": 0.0, "log_level": "error"}
    merged = {"engine": list(engines)} | defaults | settings
    workers = merged.get("workers", 1)
    return Node(partial(_run_router, merged), merged["metrics_port"], has_children=workers > 1)


@asynccontextmanager
async def serving(
    engines: Sequence[Node], front: Node, *, api_key: str | None = None
) -> AsyncIterator[AsyncClient]:
    """Start engines and their router; yield a client once the router uses all engines."""
    async with AsyncExitStack() as stack:
        for node in (*engines, front):
            stack.push_async_callback(node.close)
            await node.start()
        await all_up(front, len(engines), api_key=api_key)
        yield await stack.enter_async_context(AsyncClient(front.address, api_key=api_key))


async def all_up(front: Node, engines: int, *, api_key: str | None = None) -> None:
    """Wait until a router uses all engines."""
    async with AsyncClient(front.address, api_key=api_key) as client:
        while sum(m.engines for m in await client.list_models()) < engines:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _run(serve: Serve, errors: Path | None, port: int, ready: Connection) -> None:
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    serve(port, ready)


def _run_engine(
    settings: dict[str, Any],
    threads: int | None,
    sabotage: Callable[[], None] | None,
    port: int,
    ready: Connection,
) -> None:
    from octavo.engine.server import serve  # noqa: PLC0415 - imported in the process that forks

    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise the engine chooses the number
        torch.set_num_threads(threads)
    engine_settings = EngineSettings(**settings, port=port)
    logging.configure(engine_settings.log_format, engine_settings.log_level)

    def on_ready(address: str) -> None:
        if sabotage is not None:
            sabotage()
        ready.send(address)

    uvloop.run(serve(engine_settings, on_ready=on_ready))


def _run_router(settings: dict[str, Any], port: int, ready: Connection) -> None:
    from octavo.cli.worker_group import run_workers  # noqa: PLC0415
    from octavo.router.server import serve  # noqa: PLC0415 - imported in the process that forks

    own = RouterSettings(**settings, port=port)
    logging.configure(own.log_format, own.log_level)

    def on_ready(address: str) -> None:
        settle()  # as in `octavo router`; else collections would scan this module's PyTorch too
        ready.send(address)

    uvloop.run(serve(own, on_ready=on_ready) if own.workers == 1 else run_workers(own, on_ready))
