"""Authentication: finds the tenant of an API key or client certificate."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import structlog
from prometheus_client import CollectorRegistry, Counter
from pydantic import SecretStr

from octavo.common import rpc
from octavo.common.file_signature import FileWatch
from octavo.common.settings import SettingsError
from octavo.router.tenants.tenant import ANONYMOUS, Tenant, hash_key, read_tenants

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
"""Seconds between checks of the tenants' file for changes."""
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Services without authentication: load balancers have no keys."""
SCHEME = "bearer "
KEY_MISSING = "an API key is needed, as `authorization: Bearer KEY`"
KEY_UNKNOWN = "the API key is unknown"
NO_KEY = "`authorization` must be `Bearer KEY`, with one API key"
NOT_ONE_TENANTS_CERTIFICATE = (
    "the client's certificate is not that of one tenant, and there is no API key, as "
    "`authorization: Bearer KEY`"
)
CERTIFICATE_NAMES = {"peer_uri": "uri", "peer_dns": "dns", "x509_common_name": "cn"}
"""Names of certificate properties in gRPC, and in the tenants' file."""


_caller: ContextVar[Tenant] = ContextVar("caller", default=ANONYMOUS)


def caller() -> Tenant:
    """Return the tenant of the gRPC call in progress."""
    return _caller.get()


class Authenticator:
    """Find a caller's tenant by API key or certificate; allow all calls if no keys are configured.

    Args:
        path: Path of the tenants' file, if any.
        registry: Registry for the metrics.
        api_key: The only API key, if there is no tenants' file.
        workers: Number of the router's processes; see `read_tenants`.

    Raises:
        SettingsError: The file is unreadable or invalid.

    Attributes:
        open: Whether all calls are allowed without authentication.
    """

    def __init__(
        self,
        path: Path | None,
        registry: CollectorRegistry,
        *,
        api_key: SecretStr | None = None,
        workers: int = 1,
    ) -> None:
        self._path = path
        self._file = None if path is None else FileWatch(path)
        self._workers = workers
        self._refused = Counter(
            "octavo_router_unauthenticated",
            "Calls without a valid key or certificate.",
            registry=registry,
        )
        self._by_key: dict[str, Tenant] = {}
        self._by_certificate: dict[str, Tenant] = {}
        self._by_name: dict[str, Tenant] = {}
        self.open = path is None and api_key is None
        if api_key is not None:
            self._index(
                [replace(ANONYMOUS, keys=(hash_key(api_key.get_secret_value()),), admin=True)]
            )
        if path is not None:
            self._index(read_tenants(path, workers))

    def authenticate(
        self,
        authorization: str | None,
        certificate: Iterable[str] = (),
        *,
        peer: str = "",
        method: str = "",
    ) -> Tenant:
        """Return the tenant of a key or, without a key, of a certificate.

        All calls of all transports are authenticated here.

        Args:
            authorization: "Bearer KEY", if the caller sent it.
            certificate: Names in the client's verified certificate, in the form of
                `Tenant.certificates`.
            peer: The client's address, for the log.
            method: Name of the called method, for the log.

        Raises:
            rpc.RpcError: UNAUTHENTICATED, with a message that says what is missing or wrong.
        """
        if self.open:
            return ANONYMOUS
        if authorization is None:
            names = set(certificate)
            tenants = {self._by_certificate[name] for name in names & self._by_certificate.keys()}
            tenant = tenants.pop() if len(tenants) == 1 else None
            why = NOT_ONE_TENANTS_CERTIFICATE if names else KEY_MISSING
        elif authorization.lower().startswith(SCHEME):
            # The lookup is by hash, so its timing reveals nothing about keys.
            tenant = self._by_key.get(hash_key(authorization[len(SCHEME) :]))
            why = KEY_UNKNOWN
        else:
            tenant, why = None, NO_KEY
        if tenant is None:
            self._refused.inc()
            log.info("unauthenticated", peer=peer, method=method)
            raise rpc.RpcError(grpc.StatusCode.UNAUTHENTICATED, why)
        return tenant

    def find(self, name: str) -> Tenant | None:
        """Return the tenant of a name; None if there is none."""
        return ANONYMOUS if self.open else self._by_name.get(name)

    def check(self, method: str, context: rpc.Context) -> None:
        """Authenticate a gRPC call and set its `caller`.

        Raises:
            rpc.RpcError: UNAUTHENTICATED if no tenant matches.
        """
        if self.open or method.startswith(OPEN_SERVICES):
            return
        authorization = _authorization(context)
        names = _certificate(context) if authorization is None else ()
        peer = context.peer()
        _caller.set(self.authenticate(authorization, names, peer=peer, method=method))

    def check_admin(self, method: str, context: rpc.Context) -> None:
        """Authenticate a call of AdminService like `check`.

        Raises:
            rpc.RpcError: UNAUTHENTICATED, or PERMISSION_DENIED if the tenant is not an admin.
        """
        self.check(method, context)
        if not (self.open or method.startswith(OPEN_SERVICES) or caller().admin):
            raise rpc.denied(f"tenant {caller().name!r} is not an admin")

    async def watch(self) -> None:
        """Reload the file when it changes, until cancelled; ignore an invalid file."""
        while self._path is not None:
            await asyncio.sleep(POLL_SECONDS)
            self._look(self._path)

    def _look(self, path: Path) -> None:
        if self._file is None or not self._file.changed():
            return
        try:
            tenants = read_tenants(path, self._workers)
        except SettingsError as error:
            log.warning("tenants' file not reloaded", reason=str(error))
            return
        self._index(tenants)
        log.info("tenants' file reloaded", tenants=len(tenants))

    def _index(self, tenants: Sequence[Tenant]) -> None:
        self._by_key = {key: tenant for tenant in tenants for key in tenant.keys}
        self._by_certificate = {name: tenant for tenant in tenants for name in tenant.certificates}
        self._by_name = {tenant.name: tenant for tenant in tenants}


def check_model(tenant: Tenant, names: Collection[str], model: str) -> None:
    """Raise PERMISSION_DENIED if a tenant may not use a model, whether or not it exists.

    Args:
        tenant: The caller.
        names: All names of the model.
        model: The model name in the request; empty: none.
    """
    if not tenant.may_use(names) and (model or not tenant.models):
        usable = ", ".join(sorted(tenant.models or ())) or "none"
        raise rpc.denied(
            f"tenant {tenant.name!r} may not use model {model[:128]!r}; it may use: {usable}",
            "model",
        )


def check_priority(tenant: Tenant, priority: int) -> None:
    """Raise PERMISSION_DENIED if a tenant may not use a priority."""
    if tenant.max_priority is not None and priority > tenant.max_priority:
        raise rpc.denied(
            f"tenant {tenant.name!r} may use a priority of at most {tenant.max_priority}; "
            f"got {priority}",
            "priority",
        )


def _authorization(context: rpc.Context) -> str | None:
    """Return the call's authorization; repeated headers make an invalid one."""
    metadata = context.invocation_metadata() or ()
    values = [str(value) for name, value in metadata if name == "authorization"]
    return " ".join(values) if values else None


def _certificate(context: rpc.Context) -> list[str]:
    """Return the names in the client's certificate, which gRPC has verified."""
    return [
        f"{kind}:{value.decode(errors='replace')}"
        for name, kind in CERTIFICATE_NAMES.items()
        for value in context.auth_context().get(name, ())
    ]
