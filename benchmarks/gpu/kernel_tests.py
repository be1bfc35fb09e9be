"""Runs the kernels' tests on the GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_tests(seconds: int) -> dict[str, object]:
    """Runs tests/kernels/test_triton.py for at most so long.

    Their own configuration is left out: it wants plugins that a machine with a GPU and
    little else may lack, and these tests need none.

    Returns:
        `passed` and `failed`, counts; `stopped`, whether time ran out; `output`, its end.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(ROOT), "--confcutdir", str(ROOT / "tests/kernels")]
    command += ["--import-mode=importlib", "-m", "not slow", "-W", "ignore"]
    command.append(str(ROOT / "tests/kernels/test_triton.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    stopped = False
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        output = done.stdout
    except subprocess.TimeoutExpired as expired:
        stopped = True
        output = (expired.stdout or b"").decode() if expired.stdout else ""
    return {
        "passed": len(re.findall(r"\bPASSED\b", output)),
        "failed": len(re.findall(r"::\S+ (?:FAILED|ERROR)\b", output)),
        "stopped": stopped,
        "output": output[-4000:],
    }
