"""What all tests share."""

import os
from pathlib import Path

import pytest

from octavo.common import models


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's directory: fetched and converted on the first run on a machine."""
    return Path(models.resolve(models.DEMO))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a developer's OCTAVO_... variables out of the tests, but for the cache's place."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name != "OCTAVO_CACHE_DIR":
            monkeypatch.delenv(name)
