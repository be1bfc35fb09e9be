"""Tenants: names, keys, limits and permissions, and the file that lists them."""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from octavo.common.settings import SettingsError, parse_toml

SALT_BYTES = 32

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
KeyHash = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Rate = Annotated[float, Field(ge=0.001, allow_inf_nan=False)]
Identity = Annotated[str, StringConstraints(pattern=r"^(uri|dns|cn):.+$")]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Tenant:
    """A caller or group of callers with its own limits.

    Attributes:
        name: Unique name; empty for the anonymous tenant.
        weight: Share of the engines relative to other tenants, when demand exceeds capacity.
        keys: Hashes of the API keys, from `hash_key`.
        certificates: Names in client certificates, each with a prefix: "uri:", "dns:" (subject
            alternative names) or "cn:".
        requests_per_second: Maximum call rate, with bursts of one second's calls; None: unlimited.
        tokens_per_minute: Maximum rate of prompt and output tokens, with bursts of one minute's
            tokens; None: unlimited. At admission, a request reserves its prompt and max_tokens per
            output (by default, the expected output length); unused tokens are returned when it
            ends.
        max_concurrency: Maximum requests in progress; None: unlimited.
        max_priority: Maximum priority of requests; None: unlimited.
        models: Models that the tenant may use, each by any of its names; None: all.
        share_prefixes: Group of tenants that share cached prefixes; None: no sharing.
        admin: Whether the tenant may call AdminService.
        allow_special_tokens: Whether requests may let chat texts spell control tokens.
    """

    name: str = ""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    keys: tuple[KeyHash, ...] = ()
    certificates: tuple[Identity, ...] = ()
    requests_per_second: Rate | None = None
    tokens_per_minute: Rate | None = None
    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    max_priority: int | None = 0
    models: frozenset[str] | None = None
    share_prefixes: Name | None = None
    admin: bool = False
    allow_special_tokens: bool = False

    def may_use(self, names: Collection[str]) -> bool:
        """Return whether any of a model's names is allowed."""
        return self.models is None or not self.models.isdisjoint(names)

    def salt(self, requested: str) -> str:
        """Return the salt of the tenant's cached prefixes.

        It differs from any other tenant's, unless they share prefixes. All routers compute the same
        salt from the same names.

        Args:
            requested: The salt in the request.
        """
        if not self.name:
            return requested
        owner = f"group {self.share_prefixes}" if self.share_prefixes else f"tenant {self.name}"
        digest = hashlib.blake2b(digest_size=SALT_BYTES, person=b"octavo.tenant")
        digest.update(f"{owner}\n{requested}".encode())  # names contain no line break
        return digest.hexdigest()


ANONYMOUS = Tenant(max_priority=None)
_TENANT = TypeAdapter(Tenant)


def hash_key(key: str) -> str:
    """Return the hash of an API key, in the form of the tenants' file.

    Plain SHA-256 suffices: keys are random, so a dictionary attack is useless.
    """
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def read_tenants(path: Path, workers: int = 1) -> tuple[Tenant, ...]:
    """Return the tenants of a TOML file: one table each, whose name is the tenant's.

    Args:
        path: The file.
        workers: Number of the router's processes. With several, tenants may have no limits, as each
            process counts only its own calls.

    Raises:
        SettingsError: The file is unreadable or invalid; the message names the place but shows no
            values, which may be keys.
    """
    tables = parse_toml(path, "--tenants")
    tenants = tuple(_tenant(path, name, table) for name, table in tables.items())
    for tenant in tenants if workers > 1 else ():
        for limit in ("requests_per_second", "tokens_per_minute", "max_concurrency"):
            if getattr(tenant, limit) is not None:
                raise SettingsError(
                    f"{path}: [{tenant.name}] {limit} needs --workers 1 (given: {workers}): a "
                    "worker knows only its own calls, so a tenant could exceed the limit at "
                    "several workers"
                )
    for what in ("keys", "certificates"):
        owners: dict[str, str] = {}
        for tenant in tenants:
            for item in getattr(tenant, what):
                other = owners.setdefault(item, tenant.name)
                if other != tenant.name:
                    raise SettingsError(
                        f"{path}: {other!r} and {tenant.name!r} share one of their {what}"
                    )
    return tenants


def _tenant(path: Path, name: str, table: Any) -> Tenant:  # noqa: ANN401 - any TOML value
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: {name!r} must be a table, [{name}], of one tenant")
    if not re.fullmatch(NAME, name) or "name" in table:
        raise SettingsError(
            f"{path}: a tenant's name, here [{name}], must be at most 64 letters, digits, '.', '_' "
            "and '-'"
        )
    try:
        return _TENANT.validate_python({"name": name, **table})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = HINTS.get(str(first["loc"][0]), first["msg"])
        raise SettingsError(f"{path}: [{name}] {where}: {what}") from None


HINTS = {
    "keys": "must be hashes of keys, sha256:...; `octavo key` makes a key and its hash",
    "certificates": "must be names in certificates: uri:..., dns:... or cn:...",
}
"""Error messages that replace pydantic's for patterns, by field."""
