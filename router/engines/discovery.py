"""Discovery of engines: by a DNS name, Pods with Kubernetes labels, a name on a Ray cluster."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import structlog

from octavo.common.background import call_in_thread
from octavo.common.ports import Listener
from octavo.router.engines.changes import EngineChanges
from octavo.router.engines.kubernetes import PodWatch
from octavo.router.engines.pool import EnginePool
from octavo.router.settings import DNS_SCHEME, KUBERNETES_SCHEME, RAY_SCHEME

log = structlog.get_logger(__name__)

Resolve = Callable[[str, int], Awaitable[set[str]]]


async def resolve(name: str, port: int) -> set[str]:
    """Return HOST:PORT for every address of a DNS name.

    Raises:
        OSError: The name cannot be resolved now.
    """
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {Listener(str(address[0]), port).address for *_, address in addresses}


async def resolve_ray(name: str) -> set[str]:
    """Return HOST:PORT for every engine of a name on the Ray cluster.

    Raises:
        OSError: They cannot be found now.
    """
    look_up = await call_in_thread(_import_look_up)
    return await look_up(name)


def _import_look_up() -> Callable[[str], Awaitable[set[str]]]:
    from octavo.ray.directory import look_up  # noqa: PLC0415 - of an extra; it takes seconds

    return look_up


class Discovery:
    """Keeps a pool's engines up to date with DNS names, Kubernetes labels and names in Ray.

    An engine whose address disappears is drained, and removed when idle. While a name cannot be
    resolved, its last addresses stay: dead engines are noticed by their connections. Engines from
    other sources are left alone, and engines that others removed stay removed.

    Args:
        targets: Names with `DNS_SCHEME` and port, labels with `KUBERNETES_SCHEME` and port, names
            with `RAY_SCHEME`.
        pool: The pool to update.
        interval: Seconds between lookups, and before a failed watch is restarted.
        resolve: Returns HOST:PORT for each address of a DNS name.
        changes: Earlier changes by AdminService: drained engines stay drained, and removed ones
            stay removed while their name or labels have them.
    """

    def __init__(
        self,
        targets: Iterable[str],
        pool: EnginePool,
        interval: float,
        resolve: Resolve = resolve,
        changes: EngineChanges | None = None,
    ) -> None:
        changes = changes or EngineChanges()
        self._found: dict[str, set[str]] = {target: set(changes.removed) for target in targets}
        self._drained = set(changes.drained)
        self._pool = pool
        self._interval = interval
        self._resolve = resolve
        self._own: set[str] = set()
        self._known: set[str] = set().union(*self._found.values())
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look up all names periodically and watch all labels, until cancelled."""
        async with asyncio.TaskGroup() as watches:
            for target in self._found:
                if target.startswith(KUBERNETES_SCHEME):
                    watches.create_task(self._watch(target))
            while self._found:
                await self.look()
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._interval)

    async def _watch(self, target: str) -> None:
        """Update the engines of a target's labels, until cancelled."""
        while True:
            try:
                async for addresses in PodWatch(target).addresses():
                    self._found[target] = addresses
                    self._changed.set()
            except OSError as error:
                log.warning("engines' Pods not watched", labels=target, reason=str(error))
            await asyncio.sleep(self._interval)

    async def look(self) -> None:
        """Look up all names once, and update the pool."""
        for target in self._found:
            if target.startswith(KUBERNETES_SCHEME):
                continue
            try:
                self._found[target] = await self._look_up(target)
            except OSError as error:
                log.warning("engine name not resolved", name=target, reason=str(error))
        before, after = self._known, set().union(*self._found.values())
        self._known = after
        for address in after - before:
            self._take(address)
        self._own = {address for address in self._own if address in self._pool}
        for address in self._own - after:
            await self._retire(address)

    async def _look_up(self, target: str) -> set[str]:
        if target.startswith(RAY_SCHEME):
            return await resolve_ray(target.removeprefix(RAY_SCHEME))
        name, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
        return await self._resolve(name, int(port))

    def _take(self, address: str) -> None:
        if address in self._own or address not in self._pool:
            log.info("engine discovered", engine=address)
            self._pool.add(address)
            self._own.add(address)
            if address in self._drained:
                self._drained.remove(address)
                self._pool.drain(address)

    async def _retire(self, address: str) -> None:
        link = self._pool.drain(address)
        if not link.sequences:
            log.info("engine retired", engine=address)
            await self._pool.remove(address, disappeared=True)
