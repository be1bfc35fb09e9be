"""Reads Linux's files about the machine, under a root that tests can replace."""

from pathlib import Path

SYSTEM = Path("/")
"""Root of this machine's files."""


def read_text(file: Path) -> str:
    """Return the stripped text of a file; empty if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
