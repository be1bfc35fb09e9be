"""The door put together: started and stopped with the router it belongs to."""

from collections.abc import Callable, Mapping
from functools import partial

import grpc.aio

from octavo.common.background import first_to_end
from octavo.router.engines.pool import EnginePool
from octavo.router.http.app import Api
from octavo.router.http.loopback_client import Link
from octavo.router.http.server import HttpServer
from octavo.router.http.status import status
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.service import GenerationService
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Gate
from octavo.router.text.tokenization import Tokenizer


class HttpDoor:
    """HTTP for the clients of one router.

    Args:
        settings: Where to listen, and limits.
        services: The router's gRPC services, as `rpc.create_server` takes them.
        gate: Who may use the router.
        pool: The engines, whose load is shown.
        service: The router's service, whose figures are shown.
        is_serving: Whether there is an engine to serve with.
    """

    def __init__(
        self,
        settings: RouterSettings,
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
        *,
        gate: Gate,
        pool: EnginePool,
        service: GenerationService,
        is_serving: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._vocabularies: dict[Tokenizer, Vocabulary] = {}
        self._link = Link(services, guard=gate.check, max_message_bytes=settings.max_message_bytes)
        api = Api(
            settings,
            self._link,
            gate=gate,
            vocabularies=self._vocabulary,
            status=partial(status, pool, service),
            is_serving=is_serving,
        )
        self._server = HttpServer(api.app(), settings)

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: The address is taken or not this machine's.
            TlsError: Its certificate cannot be used.
        """
        await self._link.start()
        self._server.start(self._settings.http_host, self._settings.http_port)

    async def ended(self) -> None:
        """Wait until a part of it has stopped; raise what that failed with."""
        await first_to_end(server=self._server.ended(), link=self._link.ended())

    async def stop(self) -> None:
        """Ends what is in progress, within a second or two."""
        await self._server.stop()
        await self._link.stop()

    def _vocabulary(self, model: str) -> Vocabulary:
        """Returns the vocabulary of a model that has just answered."""
        tokenizer = self._pool.tokenizer(model)
        if tokenizer not in self._vocabularies:
            eos = self._pool.eos_token_ids(model)
            self._vocabularies[tokenizer] = Vocabulary(tokenizer.pieces, eos)
        return self._vocabularies[tokenizer]
