"""Tenants: their names, keys, limits and permissions, and the file that lists them."""

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
    """A caller, or group of callers, with limits of its own.

    Attributes:
        name: Unique; empty for the anonymous tenant.
        weight: Its share of the engines relative to other tenants', when all
            ask for more than there is.
        keys: Hashes of its API keys, as `hash_key` makes them.
        certificates: Its names in clients' certificates: "uri:", "dns:" (subject
            alternative names) or "cn:" and the name.
        requests_per_second: Maximum rate of calls; bursts of one second's worth; None: any.
        tokens_per_minute: Maximum rate of prompt and output tokens; bursts of a minute; None: any.
            A request reserves its prompt and max_tokens of each output when it is admitted (by
            default the expected length of outputs); the unused rest is given back when it ends.
        max_concurrency: Maximum requests in progress; None: any.
        max_priority: Maximum priority of its requests; None: any.
        models: Models that it may use, each by any of its names; None: all.
        share_prefixes: Cached prefixes are shared with the tenants that name
            the same group; None: with nobody.
        admin: Whether it may call AdminService.
        allow_special_tokens: Whether its requests may ask that texts of chats spell control tokens.
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
        """Return whether it may use a model that has these names: one that is allowed is enough."""
        return self.models is None or not self.models.isdisjoint(names)

    def salt(self, requested: str) -> str:
        """Return the salt that its prefixes are cached under.

        No salt that another tenant asks for gives the same, unless they share
        prefixes. The same in every router, for as long as the names stay.

        Args:
            requested: The request's own.
        """
        if not self.name:
            return requested
        owner = f"group {self.share_prefixes}" if self.share_prefixes else f"tenant {self.name}"
        digest = hashlib.blake2b(digest_size=SALT_BYTES, person=b"octavo.tenant")
        digest.update(f"{owner}\n{requested}".encode())  # a name has no line's end
        return digest.hexdigest()


ANONYMOUS = Tenant(max_priority=None)
_TENANT = TypeAdapter(Tenant)


def hash_key(key: str) -> str:
    """Return an API key as the tenants' file has it.

    One plain SHA-256 is enough: keys are random, so there is nothing to guess.
    """
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def read_tenants(path: Path, workers: int = 1) -> tuple[Tenant, ...]:
    """Return the tenants in a TOML file: one table each, named after it.

    Args:
        path: The file.
        workers: The router's processes: each counts its own calls, so with several of them
            nothing is counted rightly, and no tenant may have limits.

    Raises:
        SettingsError: The file cannot be read, or is wrong; the message says
            where, and repeats no value, which may be a key.
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
                        f"{path}: {other!r} and {tenant.name!r} have one of their {what} in common"
                    )
    return tenants


def _tenant(path: Path, name: str, table: Any) -> Tenant:  # noqa: ANN401 - whatever TOML has
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: {name!r} must be a table, [{name}], of one tenant")
    if not re.fullmatch(NAME, name) or "name" in table:
        raise SettingsError(
            f"{path}: a tenant's name is that of its table, [{name}]: letters, digits, '.', '_' "
            "and '-', 64 at most"
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
"""Error messages in place of patterns, by field."""
