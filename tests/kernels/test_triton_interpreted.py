"""Runs the GPU tests under Triton's interpreter, for machines without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

triton = pytest.importorskip("triton")

if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
    pytest.skip("before 3.7, Triton's interpreter fails with NumPy 2.4", allow_module_level=True)

TESTS = Path(__file__).parents[1]


def run_interpreted(*tests, marks="not slow"):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-m", marks, *(str(TESTS / name) for name in tests)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_kernels():
    run_interpreted(
        *("kernels/test_triton.py", "kernels/test_triton_experts.py"),
        *("kernels/test_triton_low_rank.py", "kernels/test_triton_quantized.py"),
        *("kernels/test_triton_states.py", "kernels/test_guarded.py"),
    )


def test_late_streams():
    run_interpreted("engine/execution/test_lazy_gpu.py")


@pytest.mark.slow
def test_engine():
    run_interpreted("engine/execution/test_on_gpu.py")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_kernels_widely():
    run_interpreted("kernels/test_triton.py", marks="slow")
    run_interpreted("kernels/test_triton_states.py", marks="slow")
