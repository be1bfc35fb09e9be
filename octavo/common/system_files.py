"""Reads the files in which Linux describes a machine, under a root that tests replace."""

from pathlib import Path

SYSTEM = Path("/")
"""The root of the machine's own files."""


def read_text(file: Path) -> str:
    """Return the text of a file without surrounding spaces; an empty text if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
