"""Rules for names and paths of adapters."""

import re

from octavo.common import rpc

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
ADAPTER_NAMES = (
    "a name has at most 128 letters, digits and . _ / : -, and begins with a letter or digit"
)
"""The rule for names, as text."""
MAX_PATH = 4096
"""Maximum characters of the path of an adapter's directory."""


def check_adapter_name(name: str) -> None:
    """Raise INVALID_ARGUMENT if an adapter's name is invalid."""
    if not ADAPTER_NAME.fullmatch(name):
        raise rpc.invalid("name", f"name cannot be {name[:256]!r}: {ADAPTER_NAMES}")


def check_adapter_path(path: str) -> None:
    """Raise INVALID_ARGUMENT if a path cannot be a directory's."""
    if not 1 <= len(path) <= MAX_PATH or "\0" in path:
        raise rpc.invalid("path", f"path must be a directory, of 1 to {MAX_PATH} characters")
