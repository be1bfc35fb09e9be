"""The device of the Triton kernels' tests: a GPU, or the CPU with the interpreter.

Triton reads TRITON_INTERPRET once, when imported. So tests with these `MARKS` are skipped without a
GPU, and test_triton_interpreted.py runs them in a new process, where all accesses to memory are
checked (see `guarded`).
"""

import os

import pytest
import torch

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MARKS = [] if INTERPRETED else [pytest.mark.gpu, NEEDS_GPU]

if INTERPRETED:
    from tests.kernels.guarded import guard

    guard()
