"""The engines: connecting to each, knowing what it serves, noticing when it is gone."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from octavo.common import rpc
from octavo.common.limits import Limits
from octavo.v1 import engine_pb2, engine_pb2_grpc, generation_pb2
from router.balancing.prefixes import Prefixes
from router.balancing.prompt import Prompt
from router.breaker import CircuitBreaker
from router.config import RouterSettings
from router.session import Session
from router.tokenization import Tokenizer, Tokenizers

log = structlog.get_logger(__name__)

BACKOFF = wait_random_exponential(multiplier=0.25, min=0.05, max=1.0)
"""Seconds between attempts to connect: short, as an engine that comes back is needed."""


@dataclass(slots=True, eq=False)
class Engine:
    """One connection to one engine, from its opening to its end.

    Attributes:
        address: Where it is.
        info: What it said it is.
        tokenizer: Its model's tokenizer.
        load: What it reported last.
        session: The stream.
        sequences: Sequences given to it that have not ended.
        prefixes: What its prefix cache is believed to hold.
        up: Whether it can be used: from its core's first sign of life to the
            connection's end.
    """

    address: str
    info: engine_pb2.GetEngineInfoResponse
    tokenizer: Tokenizer
    load: engine_pb2.Load
    session: Session
    sequences: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)
    up: bool = False

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in its running batch."""
        return self.info.max_num_seqs

    def cached_tokens(self, prompt: Prompt) -> int:
        """Returns how many of a prompt's tokens it is believed to have in its cache."""
        if not self.info.features.prefix_caching:
            return 0
        keys = prompt.keys(self.info.block_size)
        return self.prefixes.match(keys) * self.info.block_size

    def expect(self, prompt: Prompt) -> None:
        """Believes from now on that it has the prompt in its cache: it is to compute it."""
        if self.info.features.prefix_caching:
            self.prefixes.expect(prompt.keys(self.info.block_size))


class EnginePool:
    """Holds a connection to every configured engine.

    Args:
        settings: Addresses and timeouts.
        tokenizers: Where engines' tokenizers are loaded.
        on_change: Called with a model's name whenever one of its engines comes,
            goes or starts to drain.
    """

    def __init__(
        self, settings: RouterSettings, tokenizers: Tokenizers, on_change: Callable[[str], None]
    ) -> None:
        self._links = [
            _Link(address, settings, tokenizers, on_change) for address in settings.engine
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to connect to every engine."""
        self._tasks = [
            asyncio.create_task(link.run(), name=f"engine:{link.address}") for link in self._links
        ]

    async def close(self) -> None:
        """Closes every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def up(self, model: str | None = None) -> list[Engine]:
        """Returns the engines that are connected, of one model or of all."""
        engines = (link.engine for link in self._links)
        return [e for e in engines if e and e.up and model in {None, e.info.model}]

    def models(self) -> list[str]:
        """Returns the names of the models that engines serve, or served when last seen."""
        return sorted({link.engine.info.model for link in self._links if link.engine})

    def resolve(self, name: str) -> str:
        """Returns the model that a request's `model` means.

        Raises:
            rpc.RpcError: NOT_FOUND for an unknown one, INVALID_ARGUMENT for none
                among several, UNAVAILABLE while no engine has ever been up.
        """
        models = self.models()
        if not models:
            raise self._none_up("")
        if not name and len(models) == 1:
            return models[0]
        served = ", ".join(models)
        if not name:
            raise rpc.invalid("model", f"model must be set, as several are served: {served}")
        if name not in models:
            raise rpc.not_found("model", f"model {name[:128]!r} is not served; there is: {served}")
        return name

    def candidates(self, model: str) -> Sequence[Engine]:
        """Returns the engines of `model` that take new requests.

        Raises:
            rpc.RpcError: UNAVAILABLE if there are none.
        """
        engines = [engine for engine in self.up(model) if not engine.load.draining]
        if not engines:
            raise self._none_up(model)
        return engines

    def tokenizer(self, model: str) -> Tokenizer:
        """Returns the tokenizer of a resolved model."""
        return self._known(model)[0].tokenizer

    def limits(self, model: str) -> Limits:
        """Returns what every engine of a resolved model can take.

        Where engines differ the smallest limit holds, so that any of them can
        have any request.
        """
        engines = self._known(model)
        infos = [engine.info for engine in engines]
        # Counted in the largest blocks, which waste the most, whatever an engine's own are.
        block_size = max(info.block_size for info in infos)
        capacity = min(e.load.total_blocks * e.info.block_size for e in engines)
        return Limits(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            max_outputs=min(info.max_outputs for info in infos),
            block_size=block_size,
            total_blocks=capacity // block_size,
            beam_search=all(info.features.beam_search for info in infos),
        )

    def card(self, model: str, queued: int) -> generation_pb2.ModelCard:
        """Returns what clients are told of a model; `queued` wait in the router."""
        engines = self.up(model)
        limits = self.limits(model)
        loads = [engine.load for engine in engines]
        return generation_pb2.ModelCard(
            name=model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            engines=len(engines),
            block_size=limits.block_size,
            total_blocks=sum(load.total_blocks for load in loads),
            free_blocks=sum(load.free_blocks + load.cached_blocks for load in loads),
            running=sum(load.running for load in loads),
            waiting=queued + sum(load.waiting for load in loads),
            swapped=sum(load.swapped for load in loads),
            cached_blocks=sum(load.cached_blocks for load in loads),
            shared_blocks=sum(load.shared_blocks for load in loads),
            wasted_slots=sum(load.wasted_slots for load in loads),
            total_swap_blocks=sum(load.total_swap_blocks for load in loads),
            used_swap_blocks=sum(load.used_swap_blocks for load in loads),
        )

    def _known(self, model: str) -> list[Engine]:
        """Returns the model's engines that are up, or else those that last were."""
        engines = [link.engine for link in self._links if link.engine]
        return self.up(model) or [e for e in engines if e.info.model == model]

    def _none_up(self, model: str) -> rpc.RpcError:
        name = f" for model {model!r}" if model else ""
        addresses = ", ".join(link.address for link in self._links)
        return rpc.unavailable(
            f"no engine is up{name}; {len(self._links)} configured ({addresses}); "
            "retry when one is, or start one with `octavo engine`",
            retry_after=1.0,
        )


class _DisconnectedError(Exception):
    """An engine could not be reached, or gave no sign of life."""


class _Link:
    """Keeps the router connected to one address.

    Attributes:
        address: HOST:PORT.
        engine: The connection, or the last one there was.
    """

    def __init__(
        self,
        address: str,
        settings: RouterSettings,
        tokenizers: Tokenizers,
        on_change: Callable[[str], None],
    ) -> None:
        self.address = address
        self.engine: Engine | None = None
        self._settings = settings
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._breaker = CircuitBreaker()
        self._options = rpc.channel_options(
            keepalive_time=settings.keepalive_time, keepalive_timeout=settings.keepalive_timeout
        )

    async def run(self) -> None:
        """Connects, again and again, until cancelled."""
        while True:
            async for attempt in AsyncRetrying(
                wait=BACKOFF,
                retry=retry_if_exception_type(_DisconnectedError),
                before_sleep=self._tell,
            ):
                with attempt:
                    await self._hold()

    async def _hold(self) -> None:
        """Connects and stays connected; then waits for as long as the engine is not to be used.

        Raises:
            _DisconnectedError: The engine never came up.
        """
        async with grpc.aio.insecure_channel(self.address, options=self._options) as channel:
            engine = await self._connect(channel)
            try:
                reason = await engine.session.run()
            finally:
                was_up, engine.up = engine.up, False
                if was_up:
                    self._on_change(engine.info.model)
        if not was_up:
            raise _DisconnectedError(reason)
        pause = 0.0 if engine.load.draining else self._breaker.trip()
        log.warning("engine_down", engine=self.address, reason=reason, pause=pause)
        await asyncio.sleep(pause)

    async def _connect(self, channel: grpc.aio.Channel) -> Engine:
        stub: engine_pb2_grpc.EngineServiceAsyncStub
        stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[assignment]
        try:
            info = await stub.GetEngineInfo(
                engine_pb2.GetEngineInfoRequest(), timeout=self._settings.connect_timeout
            )
        except grpc.aio.AioRpcError as error:
            raise _DisconnectedError(f"{error.code().name}: {error.details()}") from error
        source = self._settings.tokenizer or info.tokenizer
        try:
            tokenizer = await self._tokenizers.load(source)
        except Exception as error:
            raise _DisconnectedError(
                f"its tokenizer {source!r} cannot be loaded ({error}); "
                "name one that can be with --tokenizer"
            ) from error
        call: Any = stub.Session()
        session = Session(
            call,
            self.address,
            lambda response: self._note(engine, response),
            self._settings.heartbeat_timeout,
        )
        engine = Engine(self.address, info, tokenizer, info.load, session)
        return engine

    def _note(self, engine: Engine, response: engine_pb2.SessionResponse) -> None:
        """Takes in what an engine says of itself."""
        engine.prefixes.apply(response.prefixes)
        if not response.HasField("load"):
            return
        drains = response.load.draining and not engine.load.draining
        engine.load = response.load
        if not engine.up:
            self._use(engine)
        elif drains:
            log.info("engine_draining", engine=self.address)
            self._on_change(engine.info.model)

    def _use(self, engine: Engine) -> None:
        """The engine has shown life: requests may go to it."""
        log.info(
            "engine_up",
            engine=self.address,
            model=engine.info.model,
            device=engine.info.device,
            version=engine.info.version,
            blocks=engine.load.total_blocks,
        )
        engine.up = True
        self._breaker.close()
        before, self.engine = self.engine, engine
        if before is not None and before.info.model != engine.info.model:
            self._on_change(before.info.model)
        self._on_change(engine.info.model)

    def _tell(self, state: RetryCallState) -> None:
        """Logs why there is no connection: once, not at every attempt."""
        error = state.outcome.exception() if state.outcome else None
        write = log.warning if state.attempt_number == 1 else log.debug
        write("engine_unreachable", engine=self.address, reason=str(error), retrying=True)
