"""`octavo key`: create an API key for a tenant."""

import re
import secrets
from typing import Annotated

import typer

from octavo.cli.output import err, out
from octavo.router.tenants.tenant import NAME, hash_key

PREFIX = "octavo_"
"""Prefix that identifies leaked keys."""
KEY_BYTES = 32


def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")] = "NAME",
) -> None:
    """Create an API key, and an entry with its hash for the --tenants file."""
    if not re.fullmatch(NAME, tenant):
        raise typer.BadParameter("a tenant's name has at most 64 letters, digits, '.', '_' and '-'")
    made = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    err.print("[dim]for the client; the key is not stored and not shown again:[/]")
    out.out(made)
    err.print("[dim]for the --tenants file:[/]")
    out.out(f'[{tenant}]\nkeys = ["{hash_key(made)}"]')
