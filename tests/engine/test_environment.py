"""An engine's environment variables for its libraries."""

import os
import subprocess
import sys

import pytest

# As at an engine's startup: first the settings, then torch.
BEGINNING = "import octavo.engine.settings, torch"


@pytest.mark.parametrize(("named", "expected"), [(None, "10000"), ("77", "77")])
def test_computing_threads_sleep_between_steps(named, expected):
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    environment.pop("GOMP_SPINCOUNT", None)
    if named:
        environment["GOMP_SPINCOUNT"] = named
    told = subprocess.run(
        [sys.executable, "-c", BEGINNING],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    if "GOMP_" not in told:
        pytest.skip("torch's OpenMP is not libgomp")
    assert f"GOMP_SPINCOUNT = '{expected}'" in told
