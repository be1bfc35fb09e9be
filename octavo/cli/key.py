"""`octavo key`: an API key for a tenant."""

import re
import secrets
from typing import Annotated

import typer

from octavo.cli.output import err, out
from octavo.router.tenants.tenant import NAME, hash_key

PREFIX = "octavo_"
"""So that whoever finds a key somewhere knows what it is."""
KEY_BYTES = 32


def key(
    tenant: Annotated[str, typer.Argument(help="Whose it is to be.")] = "NAME",
) -> None:
    """Make an API key: the key for the client, its hash for the file of --tenants."""
    if not re.fullmatch(NAME, tenant):
        raise typer.BadParameter("a tenant's name is letters, digits, '.', '_' and '-', 64 at most")
    made = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    err.print("[dim]for the client; it is kept nowhere and shown this once:[/]")
    out.out(made)
    err.print("[dim]for the tenants' file:[/]")
    out.out(f'[{tenant}]\nkeys = ["{hash_key(made)}"]')
