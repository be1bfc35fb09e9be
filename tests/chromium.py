"""Where the tests find a browser."""

import shutil
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox"]
"""Chromium's sandbox does not start for root, as which tests run in containers."""


def find(own: str) -> str:
    """Return the path of a Chromium: playwright's `own`, else the system's; skip without one."""
    path = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)}, or playwright's own")
    return path
