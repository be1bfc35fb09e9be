"""What is warned of when a router starts: ports that others can use, or listen to."""

from collections.abc import Iterator

from octavo.common.listening import is_loopback
from octavo.router.settings import RouterSettings


def exposure(settings: RouterSettings) -> Iterator[tuple[str, str]]:
    """Yield what is missing of authentication or encryption beyond this machine, and a hint."""
    hosts = [settings.host, *([settings.http_host] if settings.http_port else [])]
    if all(map(is_loopback, hosts)):
        return
    if settings.tenants is None and settings.tls_client_ca is None:
        yield "the router is unauthenticated", "set --tenants or --tls-client-ca"
    elif settings.tls is None:
        yield (
            "API keys are sent unencrypted",
            "set --tls-cert and --tls-key, unless a proxy in front of the router does TLS",
        )
