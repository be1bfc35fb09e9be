"""The pool of engines: connections, models and limits."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import grpc
import structlog

from octavo.common import rpc
from octavo.common.background import end, keep_running
from octavo.common.limits import Limits
from octavo.common.news import News
from octavo.router.balancing.policy import RequestNeeds
from octavo.router.engines.engine import Engine
from octavo.router.engines.link import EngineLink
from octavo.router.settings import RouterSettings
from octavo.router.text.tokenization import Tokenizers
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import engine_pb2, generation_pb2, sampling_pb2

MIN_COPIED_TOKENS = 256
"""Minimum tokens by which another engine's prefix is longer, so that it is copied."""

AWAITED_SECONDS = 300.0
"""Seconds in which an engine that was added may still come up, or one that disappeared come back.

Until then no router says that there is no model of a name: clients do not retry that.
"""

log = structlog.get_logger(__name__)


class EnginePool:
    """Keeps a connection to every engine that is added.

    An engine with several addresses is used and counted at one of them: the first that came up and
    is not drained. The others stay connected as replacements.

    Args:
        settings: Timeouts.
        tokenizers: Loads the engines' tokenizers.
        on_change: Called with a model's name when one of its engines comes up, goes down or starts
            to drain.
        on_load: Called with a model's name when one of its engines reports its load.
        offered: Returns the aliases of models that are loaded when requests name them, by name.
    """

    def __init__(
        self,
        settings: RouterSettings,
        tokenizers: Tokenizers,
        on_change: Callable[[str], None],
        on_load: Callable[[str], None],
        offered: Callable[[], Mapping[str, Sequence[str]]] = dict,
    ) -> None:
        self._offered = offered
        self._settings = settings
        self._tokenizers = tokenizers
        self._tell_change = on_change
        self._on_load = on_load
        self._links: dict[str, EngineLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = News()  # an engine came up, went down or drains
        self._disagreeing: set[str] = set()  # models logged for differing defaults
        self._overruled: set[tuple[str, str]] = set()  # logged pairs of alias and model
        self._disappeared: dict[str, float] = {}  # when each name of a model lost its last engine

    def __contains__(self, address: str) -> bool:
        return address in self._links

    @property
    def offered(self) -> Mapping[str, Sequence[str]]:
        """Aliases of models that are loaded when requests name them, by name."""
        return self._offered()

    @property
    def links(self) -> list[EngineLink]:
        """All engines, connected or not, sorted by address."""
        return [self._links[address] for address in sorted(self._links)]

    def add(self, address: str) -> EngineLink:
        """Start to connect to an engine; make a drained one accept requests again.

        Raises:
            rpc.RpcError: ALREADY_EXISTS if the engine was added and is not drained.
        """
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = EngineLink(
                address, self._settings, self._tokenizers, self._on_change, self._on_load
            )
        if address not in self._tasks:
            self._tasks[address] = keep_running(link.run, name=f"engine:{address}")
        elif link.draining:
            link.draining = False
            self._changed(link)
        else:
            raise rpc.RpcError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"engine {address} was already added",
                field="address",
            )
        return link

    def drain(self, address: str) -> EngineLink:
        """Drain an engine: it gets no new requests, and its running ones finish.

        Raises:
            rpc.RpcError: NOT_FOUND if there is no such engine.
        """
        link = self.link(address)
        link.draining = True
        self._changed(link)
        return link

    async def remove(self, address: str, *, disappeared: bool = False) -> None:
        """Remove an engine; its requests migrate to others.

        Args:
            address: The engine's address.
            disappeared: Whether nobody asked for it, so that its models may come back.

        Raises:
            rpc.RpcError: NOT_FOUND if there is no such engine.
        """
        link, names = self.link(address), self._all_names()
        await self.disconnect(address)
        del self._links[address]
        if disappeared:
            self._disappeared.update(dict.fromkeys(names - self._all_names(), time.monotonic()))
        self._changed(link)

    async def disconnect(self, address: str) -> None:
        """Disconnect from an engine, but remember its model; `add` connects again.

        Raises:
            rpc.RpcError: NOT_FOUND if there is no such engine.
        """
        link = self.link(address)
        if (task := self._tasks.pop(address, None)) is not None:
            await end(task)
            self._changed(link)

    async def until_up(self, address: str) -> None:
        """Wait until the engine at an added address is connected.

        Raises:
            rpc.RpcError: NOT_FOUND if there is no such engine.
        """
        await self._news.until(lambda: self.link(address).up is not None)

    async def load_tokenizer(self, source: str) -> None:
        """Load a tokenizer before an engine asks for it.

        Raises:
            TokenizerError: The tokenizer cannot be loaded.
        """
        await self._tokenizers.load(source)

    async def close(self) -> None:
        """Close every connection."""
        await end(*self._tasks.values())

    @property
    def used(self) -> list[EngineLink]:
        """All connected engines, each once, at the address in use."""
        links: dict[str, EngineLink] = {}
        for link in self._links.values():
            if (engine := link.up) is None:
                continue
            other = links.setdefault(engine.instance, link)
            if other is not link and _rank(link) < _rank(other):
                links[engine.instance] = link
        return list(links.values())

    def up(self, model: str | None = None) -> list[Engine]:
        """Return the connected engines, of one model or of all."""
        engines = (link.up for link in self.used)
        return [e for e in engines if e and (model is None or e.serves(model))]

    def models(self) -> list[str]:
        """Return the names of models that engines serve or last served, and of offered ones."""
        engines = [link.engine for link in self.links if link.engine]
        return sorted({model for engine in engines for model in engine.models} | {*self.offered})

    def names(self) -> dict[str, list[str]]:
        """Return all names of each of `models`: the model's name, then its aliases."""
        names_of_model = {model: [model] for model in self.models()}
        for alias, model in sorted(self._aliases().items()):
            names_of_model[model].append(alias)
        return names_of_model

    def names_of(self, name: str) -> list[str]:
        """Return all names of the model that `name` refers to; `name` alone if unknown."""
        return next((names for names in self.names().values() if name in names), [name])

    def adapter(self, model: str) -> engine_pb2.Adapter | None:
        """Return a resolved model's adapter; None for a base model."""
        engine = self._known(model)[0]
        return None if engine.info.model == model else engine.adapters[model]

    def resolve(self, name: str, may_use: Callable[[Collection[str]], bool]) -> str:
        """Return the model that a request's `model` refers to.

        Args:
            name: Name in the request; empty: the only base model, if there is one.
            may_use: Returns whether the caller may use a model, by all its names.

        Raises:
            rpc.RpcError: NOT_FOUND if unknown, INVALID_ARGUMENT if empty with several models,
                UNAVAILABLE while no engine was ever up, or one may come up that serves it.
        """
        models = {model: names for model, names in self.names().items() if may_use(names)}
        if not models:
            raise self._none_up("")
        meant = {each: model for model, names in models.items() for each in names}
        served = ", ".join(sorted(meant))
        base_models = {link.engine.info.model for link in self.links if link.engine}
        base_models.update(self.offered)
        unnamed = [model for model in models if model in base_models] or list(models)
        if not name and len(unnamed) == 1:
            return unnamed[0]
        if not name:
            raise rpc.invalid("model", f"model must be set, as several are served: {served}")
        if name not in meant:
            raise self.missing(name, may_use, f"; there is: {served}")
        return meant[name]

    def missing(
        self, name: str, may_use: Callable[[Collection[str]], bool], there: str = ""
    ) -> rpc.RpcError:
        """Return the error of a name that no model has that is up.

        Args:
            name: The name.
            may_use: Returns whether the caller may use a model, by all its names.
            there: Which models there are.
        """
        since = time.monotonic() - AWAITED_SECONDS
        self._disappeared = {each: at for each, at in self._disappeared.items() if at > since}
        never_up = (link for link in self._links.values() if link.engine is None)
        may_come = name in self._disappeared or any(link.added > since for link in never_up)
        if may_use(self.names_of(name)) and (may_come or name in self._all_names()):
            message = f"no engine is up for model {name[:128]!r}, but one may connect soon{there}"
            return rpc.unavailable(message, retry_after=1.0)
        return rpc.not_found("model", f"model {name[:128]!r} is not served{there}")

    def _all_names(self) -> set[str]:
        return {name for names in self.names().values() for name in names}

    def candidates(self, model: str) -> Sequence[Engine]:
        """Return the engines of `model` that accept new requests.

        Engines that failed recently, or whose step may hang, are included only if there are no
        others.

        Raises:
            rpc.RpcError: UNAVAILABLE if there are none.
        """
        taking = [
            (engine, link.doubtful)
            for link in self.used
            if (engine := link.taking) is not None and engine.serves(model)
        ]
        if not taking:
            raise self._none_up(model)
        return [engine for engine, doubtful in taking if not doubtful] or [e for e, _ in taking]

    def has_other(self, engine: Engine, model: str) -> bool:
        """Return whether another engine of a model accepts requests."""
        taking = (link.taking for link in self.used)
        return any(e and e is not engine and e.serves(model) for e in taking)

    def block_source(self, request: RequestNeeds, engine: Engine, last: Engine | None) -> str:
        """Return the address of another engine to copy a request's blocks from; empty if none.

        Args:
            request: The request.
            engine: The engine that will compute it.
            last: The engine that has computed it until now, if any.
        """

        def shares(other: Engine) -> bool:
            same = bool(engine.block_layout) and other.block_layout == engine.block_layout
            return same and other.instance != engine.instance

        if last is not None and last.instance != engine.instance:
            return last.address if shares(last) else ""  # it may be down: then computing follows
        best = max(
            filter(shares, self.up(request.model)),
            key=lambda other: other.held_tokens(request),
            default=engine,
        )
        more = best.held_tokens(request) - engine.held_tokens(request)
        return best.address if more >= MIN_COPIED_TOKENS else ""

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a resolved model."""
        return self._known(model)[0].tokenizer

    def eos_token_ids(self, model: str) -> frozenset[int]:
        """Return the tokens that end an output of a resolved model."""
        return frozenset(self._known(model)[0].info.eos_token_ids)

    def defaults(self, model: str) -> tuple[sampling_pb2.SamplingParams, int | None]:
        """Return the defaults of a resolved model's requests, as `Engine.defaults`.

        If engines differ, the first address's defaults apply, so that all routers agree.
        """
        return self._known(model)[0].defaults

    def limits(self, model: str) -> Limits:
        """Return the limits of a resolved model: the smallest of its engines'.

        So any of the engines can run any valid request.
        """
        engines = self._known(model)
        infos = [engine.info for engine in engines]
        return Limits(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            max_outputs=min(info.max_outputs for info in infos),
            budgets=tuple({engine.budget for engine in engines}),
            beam_search=all(info.features.beam_search for info in infos),
            constraints=all(info.features.constraints for info in infos),
            images=all(info.features.images for info in infos),
        )

    def embedding(self, model: str) -> engine_pb2.EmbeddingInfo | None:
        """Return how a resolved model embeds; None if it does not."""
        info = self._known(model)[0].info
        return info.embedding if info.HasField("embedding") else None

    def classifier(self, model: str) -> engine_pb2.ClassifierInfo | None:
        """Return how a resolved model classifies; None if it does not."""
        info = self._known(model)[0].info
        return info.classifier if info.HasField("classifier") else None

    def other_purpose(self, model: str) -> rpc.RpcError:
        """Return the error of a request for something that a resolved model does not do."""
        does = "generates text: use Generate"
        if self.embedding(model) is not None:
            does = "embeds texts: use Embed"
        elif self.classifier(model) is not None:
            does = "scores classes: use Score or Classify"
        return rpc.invalid("model", f"model {model!r} {does}")

    def card(self, model: str, queued: int) -> generation_pb2.ModelCard:
        """Return a model's card for clients; `queued` requests wait in the router."""
        engines = self.up(model)
        limits, (sampling, max_tokens) = self.limits(model), self.defaults(model)
        embedding = self.embedding(model) or engine_pb2.EmbeddingInfo()
        classifier = self.classifier(model) or engine_pb2.ClassifierInfo()
        loads, infos = [engine.load for engine in engines], [engine.info for engine in engines]
        return generation_pb2.ModelCard(
            name=model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            engines=len(engines),
            block_size=max(info.block_size for info in infos),
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
            warnings=sorted({text for info in infos for text in info.warnings}),
            kernels=sorted({info.kernels for info in infos if info.kernels}),
            ranks=sum(info.ranks or 1 for info in infos),
            default_sampling=sampling,
            default_max_tokens=max_tokens,
            base_model=infos[0].model if infos[0].model != model else "",
            drafted_tokens=sum(load.drafted_tokens for load in loads),
            accepted_tokens=sum(load.accepted_tokens for load in loads),
            aliases=self.names_of(model)[1:],
            embedding_dimensions=embedding.dimensions,
            prompt_names=sorted(embedding.prompts),
            similarity=embedding.similarity,
            labels=classifier.labels,
        )

    def _aliases(self) -> dict[str, str]:
        """Return the model of each alias.

        Names of models and adapters take precedence. If several models share an alias, the first by
        name with an engine up has it, or else the first.
        """
        engines = [link.engine for link in self.links if link.engine]
        engines.sort(key=lambda engine: (not engine.up, engine.info.model))
        served = {model for engine in engines for model in engine.models} | {*self.offered}
        aliases = {
            alias: model
            for model, names in self.offered.items()
            for alias in names
            if alias not in served
        }
        for engine in engines:
            for alias in set(engine.info.aliases) - served:
                aliases.setdefault(alias, engine.info.model)
        return aliases

    def _known(self, model: str) -> list[Engine]:
        """Return the model's engines that are up, or else those that last were, by address.

        Raises:
            rpc.RpcError: UNAVAILABLE if there are none.
        """
        engines = [link.engine for link in self.links if link.engine]
        known = self.up(model) or [e for e in engines if e.serves(model)]
        if not known:  # it was just removed
            raise self._none_up(model)
        return sorted(known, key=lambda engine: engine.address)

    def link(self, address: str) -> EngineLink:
        """Return the link to an address.

        Raises:
            rpc.RpcError: NOT_FOUND if there is no such engine.
        """
        if address not in self._links:
            there = ", ".join(sorted(self._links)) or "none"
            raise rpc.not_found(
                "address", f"there is no engine {address[:256]!r}; there is: {there}"
            )
        return self._links[address]

    def _changed(self, link: EngineLink) -> None:
        """Call `on_change` after an engine began or stopped accepting requests."""
        if link.engine is not None:
            for model in link.engine.models:
                self._on_change(model)

    def _on_change(self, model: str) -> None:
        """Report that an engine of `model` came up, went down or drains; warn if engines differ."""
        engines = sorted(self.up(model), key=lambda engine: engine.address)
        if all(engine.defaults == engines[0].defaults for engine in engines):
            self._disagreeing.discard(model)
        elif model not in self._disagreeing:
            self._disagreeing.add(model)
            log.warning(
                "engines of one model have different defaults of sampling parameters",
                model=model,
                used=engines[0].address,
                hint="give all the same generation_config.json and --generation-config",
            )
        self._log_overruled()
        self._news.tell()
        self._tell_change(model)

    def _log_overruled(self) -> None:
        """Log once which engines' aliases refer to another model."""
        aliases = self._aliases()
        overruled = {
            (alias, engine.info.model): used
            for engine in self.up()
            for alias in engine.info.aliases
            if (used := aliases.get(alias, alias)) != engine.info.model
        }
        for alias, model in sorted(overruled.keys() - self._overruled):
            log.warning(
                "alias means another model",
                alias=alias,
                model=model,
                used=overruled[alias, model],
                hint="give each model its own --served-model-name values",
            )
        self._overruled = set(overruled)

    def _none_up(self, model: str) -> rpc.RpcError:
        """Return an error without engines' addresses, which only logs and AdminService show."""
        name = f" for model {model!r}" if model else ""
        unusable = sum(bool(link.problem) for link in self._links.values())
        reached = f", {unusable} reached but unusable (the router's log says why)"
        return rpc.unavailable(
            f"no engine is up{name}; {len(self._links)} configured{reached if unusable else ''}; "
            "retry when one is, or start one with `octavo engine`",
            retry_after=1.0,
        )


def _rank(link: EngineLink) -> tuple[bool, float]:
    """Return an address's rank among those of one engine; the lowest is used."""
    assert link.engine is not None
    return link.draining, link.engine.up_since
