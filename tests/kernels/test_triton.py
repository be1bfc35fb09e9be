"""The Triton kernels against the reference: on a GPU, or else interpreted on CPU.

Triton reads TRITON_INTERPRET when it is imported and keeps to it; so without a GPU
these tests are skipped here, and test_triton_interpreted.py runs them in a process
of their own.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MAX_EXAMPLES = 15 if INTERPRETED else 200

if not INTERPRETED:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]

fixtures_are_shared = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def kernels():
    from kernels import triton

    return triton


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES)
def test_attention(harness, kernels, data):
    case = data.draw(harness.cases(longest=60 if INTERPRETED else 300))
    harness.check_attention(kernels, case, DEVICE)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES // 5)
def test_write(harness, kernels, data):
    harness.check_write(kernels, data.draw(harness.cases(longest=20)), DEVICE)


@given(data=st.data())
@settings(fixtures_are_shared, max_examples=MAX_EXAMPLES // 5)
def test_copies(harness, kernels, data):
    harness.check_copies(kernels, data.draw(harness.cases(longest=20)), DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batch(harness, kernels, dtype):
    harness.check_attention(
        kernels,
        harness.case(
            lengths=[(1, 130), (50, 90), (1, 1), (23, 23)],
            num_kv_heads=3,
            group=3,
            head_dim=64,
            dtype=dtype,
        ),
        DEVICE,
    )


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_window_skips_tiles(harness, kernels, window):
    lengths = [(1, 200), (70, 200)]
    harness.check_attention(
        kernels, harness.case(lengths=lengths, group=2, sliding_window=window), DEVICE
    )


def test_nothing_to_attend_to(harness, kernels):
    harness.check_attention(kernels, harness.case(lengths=[(0, 0)]), DEVICE)
    harness.check_attention(kernels, harness.case(lengths=[(0, 0), (1, 9), (0, 30)]), DEVICE)
