"""Assembles the HTTP server; the router starts and stops it."""

import asyncio
from collections.abc import Callable

from octavo.common.background import end, report_failure
from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.router.http.app import Api
from octavo.router.http.batches.storage import BatchStorage
from octavo.router.http.headers import RequestIds
from octavo.router.http.responses.store import ResponseStore
from octavo.router.http.server import CLOSE_SECONDS, HttpServer
from octavo.router.http.stats import RouterStats
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.text.tokenizer import Tokenizer


class HttpFrontend(HttpServer):
    """The HTTP frontend of one router: its server and application.

    Args:
        settings: The address and the limits.
        generator: Serves the requests.
        authenticator: Identifies tenants by their API keys.
        pool: The engines, which hold the vocabularies.
        is_serving: Whether an engine is available.
        stats: Content of GET /status and GET /metrics.

    Raises:
        SettingsError: The file of responses or the directory of batches cannot be used.
    """

    def __init__(
        self,
        settings: RouterSettings,
        generator: Generator,
        *,
        authenticator: Authenticator,
        pool: EnginePool,
        is_serving: Callable[[], bool],
        stats: RouterStats,
    ) -> None:
        self._pool = pool
        self._vocabularies: dict[Tokenizer, Vocabulary] = {}
        self._store = ResponseStore(settings.response_store, settings.response_store_space)
        self._batches: BatchStorage | None = None
        self._resuming: list[asyncio.Task[None]] = []
        if settings.batch_dir is not None:
            self._batches = BatchStorage(settings.batch_dir, settings.batch_space)
        self._api = Api(
            settings,
            generator,
            authenticator=authenticator,
            vocabularies=self._vocabulary,
            is_serving=is_serving,
            stats=stats,
            store=self._store,
            batches=self._batches,
        )
        super().__init__(RequestIds(self._api.app()), settings)

    def start(self) -> None:
        """Start listening, and go on with the batches that have not ended."""
        super().start()
        if self._api.runner is not None:
            self._resuming.append(report_failure(self._api.runner.resume, "batches"))

    async def refuse(self) -> None:
        """Accept no new connections, refuse requests on open ones, and stop the batches."""
        await self.stop_accepting()
        self._api.refuse()
        await self._stop_batches()

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the batches and the server, then close the stores."""
        await self._stop_batches()
        await super().stop(seconds)
        await self._store.close()
        if self._batches is not None:
            await self._batches.close()

    async def _stop_batches(self) -> None:
        await end(*self._resuming)
        if self._api.runner is not None:
            await self._api.runner.stop()

    def _vocabulary(self, model: str) -> Vocabulary:
        """Return the vocabulary of a model that has answered a request."""
        tokenizer = self._pool.tokenizer(model)
        if tokenizer not in self._vocabularies:
            eos = self._pool.eos_token_ids(model)
            self._vocabularies[tokenizer] = Vocabulary(tokenizer.pieces, eos)
        return self._vocabularies[tokenizer]
