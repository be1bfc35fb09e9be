"""Packed linear layers against products in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu.linear import GROUP, PANEL, interleave, pad_outputs

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
    found = kernels.linear(x, len(bias), kernels.pack(weight), pad_outputs(bias))
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)
    wide = kernels.linear_wide(x, len(bias), kernels.pack(weight), pad_outputs(bias))
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
        *(x, len(bias), kernels.pack(whole), pad_outputs(bias), factors, pad_outputs(scale)),
        pad_outputs(whole.sum(1) * scale),
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
        *(outputs, kernels.pack(whole), pad_outputs(bias), torch.ones(x.shape[1])),
        *(pad_outputs(ones), pad_outputs(whole.sum(1).float())),
    )
    packed = kernels.pack_int4(nibbles, scale, zero)
    found = kernels.linear_int4(x, *in_8_bits, packed)
    if rows > 4:
        assert found.equal(kernels.linear_int8(x, *in_8_bits))
        return
    values = (nibbles - 8) * scale.double()[..., None] + zero.double()[..., None]
    expected = x.double() @ values.flatten(1).T + bias
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)


def in_bfloat16(weight, bias):
    """A layer's operator, and what it takes after rows and outputs."""
    return kernels.linear, (kernels.pack(weight), pad_outputs(bias))


def in_8_bits(weight, bias):
    factors = torch.linspace(0.5, 2, weight.shape[1])
    weight = weight / factors
    scale = weight.abs().amax(1).clamp_min(1e-8) / 127
    whole = (weight / scale[:, None]).round().to(torch.int8)
    scales = (factors, pad_outputs(scale), pad_outputs(whole.sum(1) * scale))
    return kernels.linear_int8, (kernels.pack(whole), pad_outputs(bias), *scales)


def in_4_bits(weight, bias):
    """The 4-bit weights are all that counts for a few rows."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low = groups.amin(-1)
    scale = ((groups.amax(-1) - low) / 15).clamp_min(1e-8).bfloat16()
    zero = (low + 8 * scale).bfloat16()
    whole = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).int()
    _, rest = in_8_bits(weight, bias)
    return kernels.linear_int4, (*rest, kernels.pack_int4(whole, scale, zero))


@pytest.mark.parametrize("make", [in_bfloat16, in_8_bits, in_4_bits])
@given(
    rows=st.integers(1, 30),
    groups=st.integers(1, 5),
    outputs=st.integers(2 * PANEL, 4 * PANEL),  # enough to be a sample of roundings
    normed=st.booleans(),
    tail=st.sampled_from(["", "residual", "gate"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_fused(make, rows, groups, outputs, normed, tail, seed):
    """Norm, residual and gate, as if they were computed before and after the product."""
    x, weight, bias = case((rows, groups * GROUP, 2 * outputs), seed)
    draw = torch.Generator().manual_seed(seed)
    norm = torch.rand(x.shape[1], generator=draw).bfloat16() + 1
    added = torch.randn(rows, 2 * outputs + 4, generator=draw).bfloat16()[:, : 2 * outputs]
    if tail == "gate":
        operator, layer = make(
            *(interleave(values[:outputs], values[outputs:]) for values in (weight, bias))
        )
    else:
        operator, layer = make(weight, bias)
    found = operator(
        *(x, outputs if tail == "gate" else 2 * outputs, *layer, int(tail == "gate")),
        *(norm if normed else None, 1e-5, added if tail == "residual" else None),
    )

    # Rounded before it is multiplied by the norm's weights, as transformers' models do.
    rows_in = torch.nn.functional.rms_norm(x, norm.shape, eps=1e-5) * norm if normed else x
    plain, layer = make(weight, bias)
    expected = plain(rows_in, 2 * outputs, *layer).double()
    if tail == "gate":
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    if tail == "residual":
        expected = expected + added
    # Rows that are normed before they become bytes are rounded once more.
    tolerance = 0.04 if normed and make is not in_bfloat16 else 0.01
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_gates_far_from_zero():
    """Where silu's exponential would overflow."""
    weight = torch.eye(GROUP).bfloat16()
    operator, layer = in_bfloat16(interleave(weight, weight), torch.zeros(2 * GROUP))
    x = torch.linspace(-3e4, 3e4, GROUP).bfloat16()[None]
    found = operator(x, GROUP, *layer, 1)
    expected = torch.nn.functional.silu(x.double()) * x.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-25)
