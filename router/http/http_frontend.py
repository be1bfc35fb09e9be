"""Assembles the HTTP server; the router starts and stops it."""

from collections.abc import Callable

from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.router.http.app import Api
from octavo.router.http.headers import RequestIds
from octavo.router.http.responses.store import ResponseStore
from octavo.router.http.server import CLOSE_SECONDS, HttpServer
from octavo.router.http.stats import RouterStats
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.text.tokenization import Tokenizer


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
        SettingsError: The file of responses cannot be used.
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
        self._api = Api(
            settings,
            generator,
            authenticator=authenticator,
            vocabularies=self._vocabulary,
            is_serving=is_serving,
            stats=stats,
            store=self._store,
        )
        super().__init__(RequestIds(self._api.app()), settings)

    async def refuse(self) -> None:
        """Accept no new connections, and refuse requests on open ones."""
        await self.stop_accepting()
        self._api.refuse()

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop the server, then close the file of responses."""
        await super().stop(seconds)
        await self._store.close()

    def _vocabulary(self, model: str) -> Vocabulary:
        """Return the vocabulary of a model that has answered a request."""
        tokenizer = self._pool.tokenizer(model)
        if tokenizer not in self._vocabularies:
            eos = self._pool.eos_token_ids(model)
            self._vocabularies[tokenizer] = Vocabulary(tokenizer.pieces, eos)
        return self._vocabularies[tokenizer]
