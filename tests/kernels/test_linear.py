"""Packed linear layers against products in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import linear as kernels
from kernels.cpu.linear import GROUP, PANEL, pad_outputs

pytestmark = pytest.mark.skipif(kernels is None, reason="the CPU lacks AVX512-BF16 or has AMX")

shapes = st.tuples(
    st.integers(1, 60),  # rows: less than a tile, several, and ragged
    st.integers(1, 24).map(lambda fours: 4 * fours),  # inputs: ragged vectors
    st.integers(1, 3 * PANEL),  # outputs: ragged panels
)


def case(shape, seed):
    """Rows of which a view is taken, weights and a bias."""
    rows, inputs, outputs = shape
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 8, generator=draw).bfloat16()[:, 4 : 4 + inputs]
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    return x, weight, torch.randn(outputs, generator=draw)


@given(shape=shapes, seed=st.integers(0, 99))
@settings(deadline=None)
def test_bfloat16(shape, seed):
    x, weight, bias = case(shape, seed)
    found = kernels.linear(x, kernels.pack(weight), pad_outputs(bias), len(bias))
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    wide = kernels.linear_wide(x, kernels.pack(weight), pad_outputs(bias), len(bias))
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-4, atol=1e-4)


@given(shape=shapes, seed=st.integers(0, 99), zero=st.booleans())
@settings(deadline=None)
def test_int8(shape, seed, zero):
    """Exactly what its definition gives, but for the last rounding."""
    x, weight, bias = case(shape, seed)
    if zero:
        x[0] = 0
    scale = weight.abs().float().amax(1) / 127
    whole = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    factors = 2.0 ** torch.randint(-2, 3, x.shape[1:])  # exact in any precision
    found = kernels.linear_int8(
        *(x, kernels.pack(whole), factors, pad_outputs(scale)),
        *(pad_outputs(whole.sum(1) * scale), pad_outputs(bias), len(bias)),
    )
    wide = x.float() * factors
    low = wide.amin(1, keepdim=True).clamp_max(0)
    step = ((wide.amax(1, keepdim=True).clamp_min(0) - low) / 255).clamp_min(1e-8)
    nothing = (-low / step).round()
    inverse = 1 / step
    # Where an element is as near to one byte as to the next, either will do.
    tie = ((wide * inverse).frac().abs() - 0.5).abs() < 1e-4
    bytes_ = ((wide * inverse).round() + nothing).clamp(0, 255)
    expected = ((bytes_ - nothing).double() @ (whole * scale[:, None].double()).T) * step + bias
    slack = (tie * step).double() @ (whole.abs() * scale[:, None].double()).T
    error = (found.double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + slack + 1e-4).all()


@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 3 * PANEL),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_int4(rows, groups, outputs, seed):
    """For few rows its own 4-bit weights; for more, the 8-bit ones that come with them."""
    x, weight, bias = case((rows, groups * GROUP, outputs), seed)
    draw = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, (outputs, groups, GROUP), generator=draw)
    scale = torch.rand(outputs, groups, generator=draw).bfloat16()
    zero = torch.randn(outputs, groups, generator=draw).bfloat16()
    whole = weight.to(torch.int8)
    ones = torch.ones(outputs)
    in_8_bits = (
        *(kernels.pack(whole), torch.ones(x.shape[1]), pad_outputs(ones)),
        *(pad_outputs(whole.sum(1).float()), pad_outputs(bias), outputs),
    )
    packed = kernels.pack_int4(nibbles, scale, zero)
    found = kernels.linear_int4(x, packed, *in_8_bits)
    if rows > 4:
        assert found.equal(kernels.linear_int8(x, *in_8_bits))
        return
    values = (nibbles - 8) * scale.double()[..., None] + zero.double()[..., None]
    expected = x.double() @ values.flatten(1).T + bias
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)
