"""LayerNorm and GELU of CPUs compute what PyTorch's do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from octavo.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.linear is None, reason="the CPU kernels cannot run here")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 400), st.integers(1, 130))


@given(
    shape=SHAPES,
    dtype=st.sampled_from(list(TOLERANCES)),
    affine=st.booleans(),
    center=st.floats(-9, 9),
)
def test_layer_norm(shape, dtype, affine, center):
    draw = torch.Generator().manual_seed(shape[1])
    x = (torch.randn(shape, generator=draw) + center).to(dtype)
    weight, bias = (torch.randn(shape[2:], generator=draw).to(dtype) for _ in range(2))
    given = (weight, bias) if affine else (None, None)
    computed = torch.ops.octavo_cpu.layer_norm(x, *given, 1e-5)
    wide = [None if each is None else each.double() for each in given]
    expected = functional.layer_norm(x.double(), shape[2:], *wide, 1e-5)
    assert computed.dtype == dtype
    error = (computed.double() - expected).abs()
    # Rounding of values counts by how much larger than their deviation they are.
    deviation = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    largest = x.double().abs().amax(-1, keepdim=True) / deviation
    scale = weight.double().abs().amax() if affine else 1.0
    tolerance = TOLERANCES[dtype] * (1 + expected.abs() + largest * scale)
    assert bool((error <= 4 * tolerance).all())


@given(shape=SHAPES, dtype=st.sampled_from(list(TOLERANCES)), tanh=st.booleans())
def test_gelu(shape, dtype, tanh):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 4).to(dtype)
    computed = torch.ops.octavo_cpu.gelu(x, tanh)
    expected = functional.gelu(x.double(), approximate="tanh" if tanh else "none")
    assert computed.dtype == dtype
    error = (computed.double() - expected).abs()
    assert bool((error <= TOLERANCES[dtype] * (1 + expected.abs())).all())
