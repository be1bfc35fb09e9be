"""Where the tests of Triton's kernels run: on a GPU, or interpreted on the CPU.

Triton reads TRITON_INTERPRET when it is imported and keeps to it. So tests with these `MARKS` are
skipped where there is no GPU, and test_triton_interpreted.py runs them in a process of their own.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MARKS = [] if INTERPRETED else [pytest.mark.gpu, NEEDS_GPU]
