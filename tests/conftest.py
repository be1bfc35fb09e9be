"""What all tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from octavo.common import models

KEPT = {"OCTAVO_CACHE_DIR", "OCTAVO_COMPILE"}

# Compiling takes minutes of both cores: the tests that want it say so.
os.environ["OCTAVO_COMPILE"] = "off"

# How fast examples are drawn says how busy the machine is, not whether the code is right.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's directory: fetched and converted on the first run on a machine."""
    return Path(models.resolve(models.DEMO))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a developer's OCTAVO_... variables out of the tests."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name not in KEPT:
            monkeypatch.delenv(name)
