"""Who is calling: from an API key or a client's certificate to a tenant."""

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
from prometheus_client import CollectorRegistry, Counter

from octavo.common import rpc
from octavo.common.files import Signature, signature
from octavo.common.settings import SettingsError
from octavo.router.tenants.tenant import ANONYMOUS, Tenant, hash_key, read_tenants

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
"""How often the tenants' file is looked at."""
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""What anybody may call: load balancers have no keys."""
SCHEME = "bearer "
KEY_MISSING = "an API key is needed, as `authorization: Bearer KEY`"
KEY_UNKNOWN = "the API key is not one of any tenant"
NO_KEY = "`authorization` must be `Bearer KEY`, with one API key"
NOT_ONE_TENANTS_CERTIFICATE = (
    "the client's certificate is not that of one tenant, and there is no API key, as "
    "`authorization: Bearer KEY`"
)
CERTIFICATE_NAMES = {"peer_uri": "uri", "peer_dns": "dns", "x509_common_name": "cn"}
"""gRPC's names for those in a client's certificate, and the tenants' file's."""

Context = grpc.aio.ServicerContext[Any, Any]

_caller: ContextVar[Tenant] = ContextVar("caller", default=ANONYMOUS)


def caller() -> Tenant:
    """Returns the tenant whose call is being handled."""
    return _caller.get()


def act_as(tenant: Tenant) -> None:
    """Makes `caller` return a tenant from now on in this task."""
    _caller.set(tenant)


class Gate:
    """Lets in those who are tenants, and everybody where there are none.

    Args:
        path: The tenants' file; None: there are none.
        registry: Where metrics are registered.

    Raises:
        SettingsError: The file cannot be read, or is wrong.
    """

    def __init__(self, path: Path | None, registry: CollectorRegistry) -> None:
        self._path = path
        self._refused = Counter(
            "octavo_router_unauthenticated", "Calls of nobody known.", registry=registry
        )
        self._seen: Signature = None  # what was read
        self._found: Signature = None  # at the last look
        self._by_key: dict[str, Tenant] = {}
        self._by_certificate: dict[str, Tenant] = {}
        if path is not None:
            self._seen = signature(path)
            self._index(read_tenants(path))

    @property
    def open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._path is None

    def check(self, method: str, context: Context) -> None:
        """Finds out who is calling; from then on `caller` tells.

        Raises:
            rpc.RpcError: UNAUTHENTICATED if that is no tenant.
        """
        if self.open or method.startswith(OPEN_SERVICES):
            return
        try:
            authorization = _authorization(context)
            names = _certificate(context) if authorization is None else ()
            act_as(self.admit(authorization, names))
        except rpc.RpcError:
            log.info("unauthenticated", peer=context.peer(), method=method)
            raise

    def check_admin(self, method: str, context: Context) -> None:
        """As `check`, for AdminService.

        Raises:
            rpc.RpcError: UNAUTHENTICATED, or PERMISSION_DENIED if the tenant is no admin.
        """
        self.check(method, context)
        if not (self.open or method.startswith(OPEN_SERVICES) or caller().admin):
            raise rpc.denied(f"tenant {caller().name!r} is no admin")

    def admit(self, authorization: str | None, certificate: Iterable[str] = ()) -> Tenant:
        """Returns the tenant with a key or, where there is none, with a certificate.

        Args:
            authorization: "Bearer KEY", if anything was sent.
            certificate: Names in the client's verified certificate, as `Tenant` has them.

        Raises:
            rpc.RpcError: UNAUTHENTICATED; the message says what is missing or wrong.
        """
        if self.open:
            return ANONYMOUS
        if authorization is None:
            names = set(certificate)
            found = {self._by_certificate[name] for name in names & self._by_certificate.keys()}
            tenant = found.pop() if len(found) == 1 else None
            why = NOT_ONE_TENANTS_CERTIFICATE if names else KEY_MISSING
        elif authorization.lower().startswith(SCHEME):
            # What is looked up is a hash: how long that takes says nothing of any key.
            tenant = self._by_key.get(hash_key(authorization[len(SCHEME) :]))
            why = KEY_UNKNOWN
        else:
            tenant, why = None, NO_KEY
        if tenant is None:
            self._refused.inc()
            raise rpc.RpcError(grpc.StatusCode.UNAUTHENTICATED, why)
        return tenant

    async def watch(self) -> None:
        """Reads the file anew whenever it changes, until cancelled.

        Where the new one is wrong, what was there stays.
        """
        while self._path is not None:
            await asyncio.sleep(POLL_SECONDS)
            self._look(self._path)

    def _look(self, path: Path) -> None:
        before, self._found = self._found, signature(path)
        if self._found == self._seen or self._found != before:
            return  # nothing new, or it may still be being written
        self._seen = self._found
        try:
            tenants = read_tenants(path)
        except SettingsError as error:
            log.warning("tenants' file not reloaded", reason=str(error))
            return
        self._index(tenants)
        log.info("tenants' file reloaded", tenants=len(tenants))

    def _index(self, tenants: Sequence[Tenant]) -> None:
        self._by_key = {key: tenant for tenant in tenants for key in tenant.keys}
        self._by_certificate = {name: tenant for tenant in tenants for name in tenant.certificates}


def check_model(tenant: Tenant, model: str) -> None:
    """Raises PERMISSION_DENIED if a tenant may not use a model, whether or not it exists."""
    if not tenant.may_use(model) and (model or not tenant.models):
        usable = ", ".join(sorted(tenant.models or ())) or "none"
        raise rpc.denied(
            f"tenant {tenant.name!r} may not use model {model[:128]!r}; it may use: {usable}",
            "model",
        )


def check_priority(tenant: Tenant, priority: int) -> None:
    """Raises PERMISSION_DENIED if a tenant may not ask for a priority."""
    if tenant.max_priority is not None and priority > tenant.max_priority:
        raise rpc.denied(
            f"tenant {tenant.name!r} may ask for a priority of {tenant.max_priority} at most; "
            f"got {priority}",
            "priority",
        )


def _authorization(context: Context) -> str | None:
    """What the call's metadata says; several are as good as a wrong one."""
    metadata = context.invocation_metadata() or ()
    values = [str(value) for name, value in metadata if name == "authorization"]
    return " ".join(values) if values else None


def _certificate(context: Context) -> list[str]:
    """The names in the client's certificate, which gRPC has verified."""
    return [
        f"{kind}:{value.decode(errors='replace')}"
        for name, kind in CERTIFICATE_NAMES.items()
        for value in context.auth_context().get(name, ())
    ]
