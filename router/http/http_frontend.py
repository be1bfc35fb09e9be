"""The HTTP server put together: started and stopped with the router it belongs to."""

from collections.abc import Callable

from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.router.http.app import Api
from octavo.router.http.headers import RequestIds
from octavo.router.http.server import CLOSE_SECONDS, HttpServer
from octavo.router.http.stats import RouterStats
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.text.tokenization import Tokenizer


class HttpFrontend:
    """HTTP for the clients of one router.

    Args:
        settings: Address and limits.
        generator: Serves the requests.
        authenticator: Tells tenants by their keys.
        pool: The engines, for their vocabularies.
        is_serving: Whether there is an engine to serve with.
        stats: Content of GET /status and GET /metrics.
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
        self._settings = settings
        self._pool = pool
        self._vocabularies: dict[Tokenizer, Vocabulary] = {}
        self._api = Api(
            settings,
            generator,
            authenticator=authenticator,
            vocabularies=self._vocabulary,
            is_serving=is_serving,
            stats=stats,
        )
        self._server = HttpServer(RequestIds(self._api.app()), settings)

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address is taken or not this machine's.
            TlsError: The certificate cannot be used.
        """
        self._server.start()

    async def ended(self) -> None:
        """Wait until the server has stopped; raise what it failed with."""
        await self._server.ended()

    def close_connections(self) -> None:
        """Let each response from now on close its connection."""
        self._server.close_connections()

    async def refuse(self) -> None:
        """Accept no more connections, and refuse requests on those that there are."""
        await self._server.stop_accepting()
        self._api.refuse()

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """End what is in progress; clients have `seconds` to read what was answered."""
        await self._server.stop(seconds)

    def _vocabulary(self, model: str) -> Vocabulary:
        """Return the vocabulary of a model that has just answered."""
        tokenizer = self._pool.tokenizer(model)
        if tokenizer not in self._vocabularies:
            eos = self._pool.eos_token_ids(model)
            self._vocabularies[tokenizer] = Vocabulary(tokenizer.pieces, eos)
        return self._vocabularies[tokenizer]
