"""Checks that precede a server's slow imports and its model: ports, files and the cache.

The servers' own code checks them again as it uses them.
"""

from collections.abc import Iterable

from octavo.common.models import cache
from octavo.common.ports import Listener, check_all
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import read_tenants


def check_router(settings: RouterSettings, others: Iterable[Listener] = ()) -> None:
    """Check what a router is about to use.

    Args:
        settings: The router's.
        others: Where else this process and its children will listen.

    Raises:
        OSError: A port is taken.
        TlsError: A certificate or key cannot be used.
        SettingsError: The tenants' file cannot be used.
    """
    check_all([*settings.listeners, *others])
    for tls in (settings.tls, settings.engine_tls):
        if tls is not None:
            tls.read()
    if settings.tenants is not None:
        read_tenants(settings.tenants)


def check_engine(settings: EngineSettings) -> None:
    """Check what an engine is about to use.

    Raises:
        OSError: A port is taken, or the cache cannot be written.
        TlsError: A certificate or key cannot be used.
    """
    check_all(settings.listeners)
    if settings.tls is not None:
        settings.tls.read()
    cache.check_usable()
