"""Startup warnings about ports without authentication or encryption."""

from collections.abc import Iterator

from octavo.common.proxies import is_loopback
from octavo.router.settings import RouterSettings


def exposure(settings: RouterSettings) -> Iterator[tuple[str, str]]:
    """Yield a warning and a hint for each public port without authentication or TLS."""
    hosts = [] if settings.uds is not None else [settings.host]
    hosts += [settings.http_host] if settings.http_port else []
    if all(map(is_loopback, hosts)):
        return
    if not settings.authenticates:
        yield "the router is unauthenticated", "set --api-key, --tenants or --tls-client-ca"
    elif settings.tls is None:
        yield (
            "API keys are sent unencrypted",
            "set --tls-cert and --tls-key, unless a proxy in front of the router does TLS",
        )
