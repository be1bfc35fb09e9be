"""Run the tests of the kernels, and of an engine that uses them, on the GPU."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENGINE = ("tests/engine/execution/test_on_gpu.py", "tests/engine/memory/test_swap.py")
KERNELS = tuple(
    f"tests/kernels/test_triton{name}.py"
    for name in ("", "_quantized", "_experts", "_low_rank", "_states")
)
ENGINE_NEEDS = (
    *("grpc_health", "grpc_status", "opentelemetry"),
    *("platformdirs", "pydantic_settings", "structlog"),
)
"""Libraries that the engine needs but kernels do not."""


def run_tests(seconds: int) -> dict[str, dict[str, Any]]:
    """Run the kernels' tests, and the engine's where its libraries are installed.

    Each file gets an equal part of the time that is left.

    Returns:
        The outcome of each file; see `run_file`.
    """
    until = time.monotonic() + seconds
    files = (*ENGINE, *KERNELS) if all(map(find_spec, ENGINE_NEEDS)) else KERNELS
    return {
        file: run_file(file, (until - time.monotonic()) / (len(files) - done))
        for done, file in enumerate(files)
    }


def run_file(file: str, seconds: float, *options: str, **variables: str) -> dict[str, Any]:
    """Run a file of tests in a process of its own.

    It ignores the tests' configuration, whose plugins a bare GPU machine may lack: these tests need
    only the fixtures of `tests/engine` or `tests/kernels`.

    Args:
        file: The file, relative to the root.
        seconds: The time limit.
        options: More options of pytest.
        variables: More environment variables.

    Returns:
        `passed`, `failed` and `skipped`: counts; `stopped`: whether time ran out; `output`: its
        end.
    """
    fixtures = ROOT.joinpath(*Path(file).parts[:2])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(ROOT), "--confcutdir", str(fixtures)]
    command += ["--import-mode=importlib", "-m", "not slow", "-W", "ignore", *options, file]
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    stopped = False
    try:
        output = subprocess.run(
            command,
            cwd=ROOT,
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(seconds, 1.0),
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as expired:
        output, stopped = expired.stdout or b"", True
    text = output.decode(errors="replace")
    words = Counter(re.findall(r"::\S.* ([A-Z]+)\b.* \[ *\d+%\]", text))
    not_read = len(re.findall(r"ERROR collecting ", text))
    return {
        "passed": words["PASSED"],
        "failed": words["FAILED"] + words["ERROR"] + not_read,
        "skipped": words["SKIPPED"],
        "stopped": stopped,
        "output": text[-4000:],
    }
