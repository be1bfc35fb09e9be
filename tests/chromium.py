"""Finds a browser for the tests."""

import shutil
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox"]
"""Flags for root, as in containers: Chromium's sandbox does not start for root."""


def find(own: str) -> str:
    """Return the path of Chromium: playwright's `own`, else the system's; skip if there is none."""
    path = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)}, or playwright's own")
    return path
