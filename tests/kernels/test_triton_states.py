"""The Triton kernels of stateful layers: see `triton_device`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference_states
from tests.kernels.state_batches import OPERATIONS, StateCase, build, check, compare, state_cases
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


RAGGED = [(70, 70), (1, 5), (33, 40), (17, 17), (16, 20), (0, 4), (40, 0), (64, 64)]
"""Sequences in chunks among decodes, few tokens and padding."""
CHUNKED = ("ssd", "gated_delta")


@pytest.mark.parametrize("options", [set(), {"d", "dt_bias", "softplus", "normalize", "limits"}])
@pytest.mark.parametrize("operation", CHUNKED)
def test_chunks_of_any_batch(kernels, operation, options):
    sizes = {"heads": 1, "shared": 2, "size": 24, "state_size": 40}
    case = StateCase(operation, RAGGED, dtype=torch.bfloat16, options=frozenset(options), **sizes)
    check(kernels, case, DEVICE)


@pytest.mark.parametrize("operation", CHUNKED)
def test_chunks_are_as_exact_as_float32(kernels, operation, monkeypatch):
    """Results are float32, too; rounded to bfloat16 they would hide errors."""
    zeros = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x, **given: zeros(x.float(), **given))
    options = frozenset({"d", "normalize"})
    case = StateCase(operation, [(75, 80)], size=32, dtype=torch.bfloat16, options=options)
    for decay in (None, 0.0, -5.0, -200.0):
        call = build(case, DEVICE)
        if decay is not None:  # logarithms of decays, of which 0 decays nothing
            call.arguments[3 if operation == "gated_delta" else 2].fill_(decay)
        wide = replace(call, arguments=[each.float() for each in call.arguments])
        expected, state = wide.run(reference_states, operation)
        found, found_state = call.run(kernels, operation)
        assert found.dtype == torch.float32
        compare(found, expected, 2e-6)
        compare(found_state, state, 2e-6)
