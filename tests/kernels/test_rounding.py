"""The rounding kernels equal PyTorch's definition, on every kind of CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.models.quantization.rounding import round_to_4_bits, to_bytes
from octavo.kernels.cpu import rounding as native
from octavo.kernels.cpu.blocks import FORMATS, dequantize, to_q4_1
from octavo.kernels.cpu.linear import GROUP
from octavo.kernels.cpu.rounding import RoundingKernels
from tests.kernels.test_linear import CPUS, emulated


@pytest.fixture(scope="module", params=CPUS)
def kernels(request, tmp_path_factory):
    if request.param == "native":
        if native is None:
            pytest.skip("there is no C++ compiler")
        yield native
        return
    with emulated(request.param, tmp_path_factory) as (operators, _):
        yield RoundingKernels(operators)


def random_weight(outputs, groups, dtype, seed):
    """Strided rows whose groups have various scales; some weights were in 4 bits before."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn((outputs, groups, GROUP), generator=draw)
    weight[::2] = weight[::2].mul(4).round().clamp(-6, 6) / 4
    weight *= torch.randn((outputs, groups, 1), generator=draw).mul(2).exp() / 100
    weight[::7] = 0
    weight[1::7] = 0.37
    wide = torch.cat([torch.full((outputs, 8), torch.nan), weight.flatten(1)], 1)
    return wide.to(dtype)[:, 8:]


def defined_q4_1(weight):
    codes, scale, zero = round_to_4_bits(weight.float(), torch.float16)
    scale, zero = scale[..., 0].float(), zero[..., 0].float()
    return to_q4_1(codes, scale, zero - 8 * scale)


def errors(rows, weight):
    distances = dequantize(rows, FORMATS["Q4_1"]) - weight.float()
    return distances.double().square().unflatten(1, (-1, GROUP)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(outputs=st.integers(1, 80), groups=st.integers(1, 9), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=12)
def test_4_bits(kernels, dtype, outputs, groups, seed):
    weight = random_weight(outputs, groups, dtype, seed)
    expected, found = defined_q4_1(weight), kernels.to_q4_1(weight)
    # Sums of squares in another order may prefer another of two equally good numbers of steps.
    size = FORMATS["Q4_1"].unit_bytes
    others = (found != expected).unflatten(1, (-1, size)).any(-1)
    assert others.double().mean() <= 0.01
    defined = errors(expected, weight)
    assert ((errors(found, weight) - defined).abs() <= 1e-5 * defined)[others].all()
    assert kernels.to_q4_1(weight.t().contiguous().t()).equal(found)


def test_equal_weights_in_4_bits(kernels):
    weight = torch.tensor([0.0, 0.5, -3.0])[:, None].repeat(1, GROUP)
    assert dequantize(kernels.to_q4_1(weight), FORMATS["Q4_1"]).equal(weight)
    assert kernels.to_q4_1(weight).equal(defined_q4_1(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(outputs=st.integers(1, 80), inputs=st.integers(1, 100), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=12)
def test_8_bits(kernels, dtype, outputs, inputs, seed):
    weight = random_weight(outputs, 4, dtype, seed)[:, :inputs]
    factors = torch.rand(inputs, generator=torch.Generator().manual_seed(seed)) + 0.1
    expected = to_bytes(weight, factors)
    for own in (weight, weight.t().contiguous().t()):
        for found, exact in zip(kernels.to_bytes(own, factors), expected, strict=True):
            assert found.equal(exact)
        assert kernels.widest(own).equal(weight.float().abs().amax(0))


def test_other_floats_in_8_bits(kernels):
    weight, factors = torch.randn(3, 40).half(), torch.ones(40)
    assert kernels.to_bytes(weight, factors)[0].equal(to_bytes(weight, factors)[0])
    assert kernels.widest(weight).equal(weight.float().abs().amax(0))
