"""Engines and routers on this machine, each a process of its own that starts in an instant.

Processes are forked from one that has imported everything, and the model is
tiny and random: so an engine that was killed is back in well under a second of
CPU time, and what a benchmark or test measures is the service around it.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from octavo import AsyncClient
from octavo.common import logging
from octavo.common.ports import free_port
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings

VOCABULARY = 257
EOS = 256
CONTEXT = 2048
PRELOAD = [
    "octavo.engine.server",
    "octavo.router.server",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]
READY_SECONDS = 120.0
STOP_SECONDS = 10.0


def make_model(directory: Path) -> str:
    """Saves a two-layer model with random weights, and a tokenizer of bytes; returns where."""
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def save_tokenizer(directory: Path) -> None:
    """Saves a tokenizer of bytes: VOCABULARY tokens, with one at the end of sequences."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


class Node:
    """One engine or router: started, killed, stopped, and started again at the same port.

    Args:
        serve: what runs in the process, given the function to call with HOST:PORT.

    Attributes:
        port: where it listens.
        address: HOST:PORT of it.
        errors: where its stderr goes; None for this process'.
    """

    def __init__(self, serve: Callable[[int, Connection], None]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._serve = serve
        self.errors: Path | None = None
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    async def start(self, seconds: float = READY_SECONDS) -> Self:
        """Starts the process and waits until it listens.

        Args:
            seconds: that it may take.

        Raises:
            TimeoutError: it does not.
            EOFError: it ended instead; it has printed why.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        self._process = self._context.Process(
            target=_run, args=(self._serve, self.errors, self.port, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        if not await asyncio.to_thread(ours.poll, seconds):
            raise TimeoutError(f"{self.address} was not ready in {seconds:g} s")
        ours.recv()
        return self

    @property
    def pid(self) -> int | None:
        """The process' id while it lives."""
        return self._process.pid if self._process.is_alive() else None

    @property
    def exitcode(self) -> int | None:
        """How the process ended, as multiprocessing has it; None while it lives."""
        return self._process.exitcode

    async def kill(self) -> None:
        """SIGKILL, at once and without a word."""
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)

    async def terminate(self) -> None:
        """SIGTERM; waits for the end."""
        self.signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.join)

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal, if it lives."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    async def close(self) -> None:
        """Ends it, however it is."""
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
    """An engine of `model` in float32; further settings are EngineSettings'.

    It does not compile: that takes both cores for a minute, and makes it faster midway.

    Args:
        model: what is served.
        threads: that compute; None for as many as it would have by itself.
        sabotage: called in the engine's process when it is ready, to make it fail later.
        settings: whatever they are.
    """
    defaults = {
        "model": model,
        "compile": "off",
        "served_model_name": "tiny",
        "dtype": "float32",
        "num_blocks": 1024,
        "max_model_len": CONTEXT,
        "swap_space": 0,
        "metrics_port": 0,
        "drain_timeout": 0.0,
        "log_level": "error",
    }
    return Node(partial(_run_engine, {**defaults, **settings}, threads, sabotage))


def router(engines: list[str], **settings: Any) -> Node:  # noqa: ANN401 - whatever they are
    """A router over engines by address; further settings are RouterSettings'."""
    defaults = {"engine": engines, "metrics_port": 0, "drain_timeout": 0.0, "log_level": "error"}
    return Node(partial(_run_router, {**defaults, **settings}))


def _run(
    serve: Callable[[int, Connection], None], errors: Path | None, port: int, ready: Connection
) -> None:
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
        torch.set_num_threads(threads)
    own = EngineSettings(**settings, port=port)
    logging.configure(own.log_format, own.log_level)

    def on_ready(address: str) -> None:
        if sabotage is not None:
            sabotage()
        ready.send(address)

    uvloop.run(serve(own, on_ready=on_ready))


def _run_router(settings: dict[str, Any], port: int, ready: Connection) -> None:
    from octavo.router.server import serve  # noqa: PLC0415 - imported in the process that forks

    own = RouterSettings(**settings, port=port)
    logging.configure(own.log_format, own.log_level)
    uvloop.run(serve(own, on_ready=ready.send))


class Wire:
    """A TCP hop to a port that can stop carrying anything, with nobody being told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._dropping = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self) -> Self:
        """Listens on a free port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def drop(self) -> None:
        """Swallows what comes from now on; connections stay open."""
        self._dropping = True

    def restore(self) -> None:
        """Carries new connections again; those that lost bytes are closed."""
        self._dropping = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        """Closes everything."""
        self._server.close()
        self.restore()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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


async def all_up(router: Node, engines: int, *, api_key: str | None = None) -> None:
    """Waits until a router uses all engines."""
    async with AsyncClient(router.address, api_key=api_key) as client:
        while sum(m.engines for m in await client.list_models()) < engines:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
