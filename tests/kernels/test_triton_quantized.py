"""Linear layers of quantized weights in Triton against their definition: see `triton_device`."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.kernels import quantized
from tests.kernels.quantized_weights import KINDS, moved, random_weight, weights
from tests.kernels.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
EXACT = {"rtol": 1e-6, "atol": 1e-6}  # zeros are differences of scaled products
MANY = 520
"""Number of rows for which weights are dequantized and PyTorch multiplies."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def large(kind):
    """Return a weight whose inputs are split."""
    return random_weight(kind, 70, 2900, 32, torch.Generator().manual_seed(0))


@given(
    weight=weights,
    rows=st.integers(1, 70) | st.sampled_from([100, 130, MANY]),
    dtype=st.sampled_from(list(TOLERANCES)),
    biased=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=6 if INTERPRETED else 200)
@example(large("points"), 3, torch.bfloat16, True, False, 0)
@example(large("nested"), 20, torch.float16, False, True, 0)
def test_quantized_linear(weight, rows, dtype, biased, wide, seed):
    from octavo.kernels.triton import quantized_linear

    draw = torch.Generator().manual_seed(seed)
    # oneDNN multiplies elements behind rows of an odd length by zero, on CPUs with AMX.
    beside = 0.0 if rows == MANY else torch.nan
    apart = torch.full((rows, weight.inputs + 8), beside)
    apart[:, 4:-4] = torch.randn((rows, weight.inputs), generator=draw)
    x = apart.to(dtype).to(DEVICE)[:, 4:-4]
    bias = torch.randn(weight.outputs, generator=draw).to(dtype) if biased else None
    on_device = moved(weight, DEVICE)
    out_dtype = torch.float32 if wide else dtype
    found = quantized_linear(x, on_device, None if bias is None else bias.to(DEVICE), out_dtype)
    expected = quantized.quantized_linear(x.cpu(), weight, bias, torch.float32)
    assert found.dtype == out_dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_one_input_at_a_time(kind):
    """Check each weight exactly: a sum may hide swapped weights."""
    from octavo.kernels.triton import quantized_linear

    weight = random_weight(kind, 66, 200, 32, torch.Generator().manual_seed(1))
    on_device = moved(weight, DEVICE)
    found = quantized_linear(torch.eye(200, device=DEVICE), on_device, None, torch.float32)
    torch.testing.assert_close(found.t().cpu(), quantized.dequantize(weight), **EXACT)
    many = torch.eye(200).repeat(2, 1).to(DEVICE)
    both = quantized_linear(many, on_device, None, torch.float32)
    torch.testing.assert_close(both[200:], found, **EXACT)


@given(
    rows=st.integers(0, 40),
    inputs=st.sampled_from([16, 64, 1040]),
    outputs=st.sampled_from([16, 48]),
    biased=st.booleans(),
    size=st.sampled_from([2.0**-70, 1.0, 2.0**20]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=6 if INTERPRETED else 40)
def test_fp8_linear(rows, inputs, outputs, biased, size, seed):
    from octavo.kernels.triton import fp8_linear

    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, inputs + 3), generator=draw).clamp(-4, 4) * 112
    if INTERPRETED:  # the interpreter does not round to the nearest
        x = x.to(torch.float8_e4m3fn).float()
    x[:, 2] = 448.0
    x = (x * size).to(torch.bfloat16)[:, 1:-2]
    x[rows // 2 :: 7] = 0
    weight = (torch.randn((outputs, inputs), generator=draw) * 99).to(torch.float8_e4m3fn)
    scale = torch.rand((1, outputs), generator=draw) / 99 / inputs**0.5
    bias = torch.randn(outputs, generator=draw).to(torch.bfloat16) if biased else None
    given = [None if own is None else own.to(DEVICE) for own in (x, weight, scale, bias)]
    found = fp8_linear(*given).float().cpu()
    expected = quantized.fp8_linear(x, weight, scale, bias).float()
    # A sum is rounded before and after the bias is added.
    least = float(expected.abs().max()) if rows else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * least)
