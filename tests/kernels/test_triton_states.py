"""The Triton kernels of stateful layers: see `triton_device`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.state_batches import OPERATIONS, StateCase, check, state_cases
from tests.kernels.triton_device import DEVICE, MARKS

# The interpreter takes milliseconds for each operation; on a GPU, each example is compiled first.
SMALL = {"longest": 9, "most_size": 40}

pytestmark = MARKS


@pytest.fixture(scope="session")
def kernels():
    from octavo.kernels import triton

    return triton


@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=5)
def test_as_defined(kernels, operation, data):
    check(kernels, data.draw(state_cases(operation, **SMALL)), DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_as_defined_widely(kernels, operation, data):
    check(kernels, data.draw(state_cases(operation, longest=40)), DEVICE)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_option(kernels, operation):
    every = frozenset({"bias", "d", "dt_bias", "softplus", "normalize", "silu", "elements"})
    lengths = [(3, 3), (1, 9), (1, 0), (18, 20), (0, 5), (1, 1)]
    case = StateCase(operation, lengths, shared=2, size=24, options=every, dtype=torch.bfloat16)
    check(kernels, case, DEVICE)
