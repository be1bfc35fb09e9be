"""Run the tests of the kernels, and of an engine that uses them, on the GPU."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tests/kernels/test_triton.py"
ENGINE = ROOT / "tests/engine/execution/test_on_gpu.py"
ENGINE_NEEDS = (
    *("grpc_health", "grpc_status", "opentelemetry"),
    *("platformdirs", "pydantic_settings", "structlog"),
)
"""Libraries that the engine needs but kernels do not."""


def run_tests(seconds: int) -> dict[str, object]:
    """Run the kernels' tests, and the engine's where its libraries are installed.

    The engine's tests get half of the time, the kernels' tests the rest.

    Returns:
        `passed` and `failed`: counts; `stopped`: whether time ran out; `output`: its end.
    """
    until = time.monotonic() + seconds
    has_engine = all(find_spec(name) for name in ENGINE_NEEDS)
    output, stopped = "" if has_engine else "an engine's libraries are not here\n", False
    for file in (ENGINE, KERNELS) if has_engine else (KERNELS,):
        printed, timed_out = _run(file, until - time.monotonic() - (file is ENGINE) * seconds / 2)
        output, stopped = output + printed, stopped or timed_out
    return {
        "passed": len(re.findall(r"\bPASSED\b", output)),
        "failed": len(re.findall(r"::\S+ (?:FAILED|ERROR)\b", output)),
        "stopped": stopped,
        "output": output[-4000:],
    }


def _run(file: Path, seconds: float) -> tuple[str, bool]:
    """Run a file of tests; return its output, and whether time ran out.

    It ignores the tests' configuration, whose plugins a bare GPU machine may lack: these tests need
    none.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(ROOT), "--confcutdir", str(file.parent)]
    command += ["--import-mode=importlib", "-m", "not slow", "-W", "ignore", str(file)]
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(seconds, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return (expired.stdout or b"").decode() if expired.stdout else "", True
    return done.stdout, False
