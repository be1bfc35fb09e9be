"""Mixtures of experts on a CPU against their definition, for every kind of x86 CPU.

Instructions that this CPU lacks are emulated, as in test_linear.py.
"""

import ctypes
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference
from octavo.kernels.activation import Activation
from octavo.kernels.cpu import experts as native
from octavo.kernels.cpu.experts import ExpertKernels, PackedProduct
from octavo.kernels.cpu.linear import GROUP, LinearKernels
from tests.kernels.conftest import activations
from tests.kernels.emulated_operators import LoadedOperators
from tests.kernels.test_linear import EMULATION, SOURCES, X86, for_x86


@dataclass(frozen=True)
class Case:
    """A layer and rows, without the tensors' values."""

    rows: int
    hidden: int
    inner: int
    experts: int
    chosen: int
    activation: Activation
    seed: int


def cases(multiple):
    """Draw ragged sizes that are multiples of a number."""

    def sizes(most):
        return st.integers(1, most).map(lambda size: multiple * size)

    return st.builds(
        Case,
        rows=st.integers(1, 50),
        hidden=sizes(100 // multiple),
        inner=sizes(80 // multiple + 1),
        experts=st.integers(1, 9),
        chosen=st.integers(1, 4),
        activation=activations,
        seed=st.integers(0, 999),
    )


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(name, marks=pytest.mark.slow) for name in X86)],
)
def kernels(request, tmp_path_factory):
    if request.param == "native":
        if native is None:
            pytest.skip("there is no C++ compiler")
        return native
    names = ("linear.cpp", "experts.cpp", "low_rank.cpp", "step.cpp")
    sources = [*(SOURCES / name for name in names), EMULATION / "torch.cpp"]
    path = for_x86(*X86[request.param], tmp_path_factory.mktemp("kernels"), *sources)
    library = ctypes.CDLL(str(path))
    operators = LoadedOperators(library)
    return ExpertKernels(library, LinearKernels(operators, library.octavo_panel_outputs()))


class Layer:
    """A case's tensors. Values that must not be read are NaN."""

    def __init__(self, case, dtype):
        self.case = case
        draw = torch.Generator().manual_seed(case.seed)

        def randn(*shape):
            return torch.randn(shape, generator=draw)

        projected = case.inner * (2 if case.activation.gated else 1)
        wide = torch.full((case.rows, case.hidden + 8), torch.nan)
        wide[:, 4:-4] = randn(case.rows, case.hidden)
        self.x = wide.to(dtype)[:, 4:-4]
        self.up = (randn(case.experts, projected, case.hidden) / case.hidden**0.5).to(dtype)
        self.down = (randn(case.experts, case.hidden, case.inner) / case.inner**0.5).to(dtype)
        self.up_bias, self.down_bias = (
            randn(case.experts, projected),
            randn(case.experts, case.hidden),
        )
        # A view of a wider tensor, with some ids that do not exist.
        ids = torch.randint(-1, case.experts + 1, (case.rows, 5), generator=draw)
        self.ids = ids[:, : case.chosen]
        weights = torch.rand((case.rows, 5), generator=draw)
        self.weights = weights[:, : case.chosen]

    def expected(self, up, down):
        """Return the definition's result with these weights, in float32."""
        return reference.experts(
            *(self.x.float(), self.ids, self.weights, up.float(), self.up_bias),
            *(down.float(), self.down_bias, self.case.activation),
        )

    def found(self, kernels, up, down):
        """Return the kernel's result with packed weights."""
        own = self.case.activation
        result = kernels.linear.operators.packed_experts(
            *(self.x, self.ids, self.weights, up.panels, up.bias, down.panels, down.bias),
            *(own.number, int(own.gated), own.alpha, own.limit, own.offset),
            *(up.factors, up.scales, down.factors, down.scales),
        )
        assert result.shape == self.x.shape
        assert result.dtype == self.x.dtype
        return result.float()

    def pack(self, kernels, pack):
        """Return both products, packing each expert's weights with a function."""
        products = []
        for weights, bias, gated in (
            (self.up, self.up_bias, self.case.activation.gated),
            (self.down, self.down_bias, False),
        ):
            own = [kernels.arrange(weight, gated=gated) for weight in weights]
            arranged = [
                kernels.linear.pad_outputs(kernels.arrange(one, gated=gated)) for one in bias
            ]
            products.append(PackedProduct(torch.stack(list(map(pack, own))), torch.stack(arranged)))
        return products


@given(case=cases(4))
@settings(deadline=None, max_examples=20)
def test_float32(kernels, case):
    layer = Layer(case, torch.float32)
    found = layer.found(kernels, *layer.pack(kernels, kernels.linear.pack))
    expected = layer.expected(layer.up, layer.down)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@given(case=cases(4))
@settings(deadline=None, max_examples=20)
def test_bfloat16(kernels, case):
    layer = Layer(case, torch.bfloat16)
    found = layer.found(kernels, *layer.pack(kernels, kernels.linear.pack))
    expected = layer.expected(layer.up, layer.down)
    # The activations between the products are rounded, too.
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=4e-2)


@given(case=cases(4), shared=st.booleans())
@settings(deadline=None, max_examples=20)
def test_int8(kernels, case, shared):
    layer = Layer(case, torch.bfloat16)
    draw = torch.Generator().manual_seed(case.seed)
    products, values = [], []
    for weights, bias, gated in (
        (layer.up, layer.up_bias, case.activation.gated),
        (layer.down, layer.down_bias, False),
    ):
        some = 1 if shared else case.experts
        factors = 2.0 ** torch.randint(-1, 2, (some, weights.shape[2]), generator=draw)
        scaled = weights.float() / factors[:, None]
        scale = scaled.abs().amax(2) / 127
        whole = (scaled / scale[..., None]).round().to(torch.int8)
        values.append(whole * scale[..., None] * factors[:, None])

        def arranged(tensors, *, gated=gated):
            return [kernels.arrange(one, gated=gated) for one in tensors]

        def padded(tensors):
            return torch.stack([kernels.linear.pad_outputs(one) for one in arranged(tensors)])

        panels = torch.stack([kernels.linear.pack(one) for one in arranged(whole)])
        scales = torch.stack([padded(scale), padded(whole.sum(2) * scale)], 1)
        products.append(PackedProduct(panels, padded(bias), factors, scales))
    expected = layer.expected(*values)
    found = layer.found(kernels, *products)
    # Inputs are rounded to 8 bits twice: over 600 cases the error was at most 2.1%.
    assert (found - expected).norm() <= 0.03 * expected.norm() + 1e-3


@given(case=cases(GROUP))
@settings(deadline=None, max_examples=20)
def test_int4(kernels, case):
    layer = Layer(case, torch.bfloat16)
    values = []

    def pack(weight):
        groups = weight.float().unflatten(1, (-1, GROUP))
        low = groups.amin(-1)
        scale = ((groups.amax(-1) - low) / 15).clamp_min(1e-8).bfloat16()
        zero = (low + 8 * scale).bfloat16()
        whole = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).int()
        return kernels.linear.pack_int4(whole, scale, zero)

    def rounded(weight):
        groups = weight.float().unflatten(1, (-1, GROUP))
        low = groups.amin(-1, keepdim=True)
        scale = ((groups.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-8).bfloat16()
        zero = (low + 8 * scale).bfloat16()
        whole = ((groups - zero) / scale + 8).round().clamp(0, 15).int()
        return ((whole - 8) * scale.float() + zero.float()).flatten(1)

    values = [torch.stack(list(map(rounded, weights))) for weights in (layer.up, layer.down)]
    expected = layer.expected(*values)
    found = layer.found(kernels, *layer.pack(kernels, pack))
    assert (found - expected).norm() <= 0.01 * expected.norm() + 1e-3


def of_e2m1(weights):
    """Dequantize `[..., groups, GROUP + 1]`: codes, then their exponent plus 127."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes, exponents = weights[..., :-1], weights[..., -1:]
    return (numbers.double()[codes] * 2.0 ** (exponents.double() - 127)).flatten(-2)


def pack_e2m1(kernels):
    return lambda own: kernels.linear.pack_e2m1(own[..., :-1], own[..., -1].to(torch.uint8))


@given(case=cases(GROUP), up=st.integers(20, 200), down=st.integers(20, 220))
@settings(deadline=None, max_examples=20)
def test_e2m1(kernels, case, up, down):
    """Exponents go from tiny to large; inputs are small where the first product's are large."""
    layer = Layer(case, torch.bfloat16)
    draw = torch.Generator().manual_seed(case.seed)

    def numbers(shape, exponent):
        groups = (*shape[:2], shape[2] // GROUP)
        codes = torch.randint(0, 16, (*groups, GROUP), generator=draw)
        exponents = torch.randint(exponent, exponent + 4, (*groups, 1), generator=draw)
        return torch.cat([codes, exponents], -1)

    layer.up, layer.down = numbers(layer.up.shape, up), numbers(layer.down.shape, down)
    layer.x = layer.x * 2.0 ** (124 - up)
    layer.down_bias *= 2.0 ** (down - 127)
    found = layer.found(kernels, *layer.pack(kernels, pack_e2m1(kernels))).double()
    expected = layer.expected(of_e2m1(layer.up), of_e2m1(layer.down)).double()
    assert (found - expected).norm() <= 0.01 * expected.norm() + 2.0 ** (down - 137)


def test_every_number_of_e2m1(kernels):
    """Inputs select one weight of each output, with every power of two."""
    hidden = 8 * GROUP
    layer = Layer(Case(GROUP, hidden, GROUP, 1, 1, Activation("relu", False), 0), torch.bfloat16)
    layer.ids, layer.weights = torch.zeros(GROUP, 1, dtype=torch.int64), torch.ones(GROUP, 1)
    layer.up_bias, layer.down_bias = torch.zeros(1, GROUP), torch.zeros(1, hidden)
    layer.up = torch.zeros(1, GROUP, hidden // GROUP, GROUP + 1, dtype=torch.int64)
    layer.up[0, :, 0, :-1] = 2 * torch.eye(GROUP)  # the code of 1
    layer.up[..., -1] = 127
    codes = torch.arange(GROUP) % 16
    exponents = torch.arange(hidden).clamp_max(254)
    layer.down = torch.cat([codes.expand(hidden, GROUP), exponents[:, None]], 1)[None, :, None]
    products = layer.pack(kernels, pack_e2m1(kernels))
    for size, chosen in ((2.0**20, exponents < 127), (2.0**-20, exponents >= 127)):
        layer.x = torch.eye(GROUP, hidden).bfloat16() * size
        found = layer.found(kernels, *products).double().T[chosen]
        expected = of_e2m1(layer.down[0, chosen]) * size
        # Where rows are rounded to 16 bits, a zero is the difference of two sums.
        least = 1e-5 * size * 2.0 ** (exponents[chosen, None].double() - 127)
        assert torch.where(expected == 0, found.abs() < least, found == expected).all()


def test_a_row_is_the_same_whatever_is_beside_it(kernels):
    case = Case(30, 64, 96, 4, 2, Activation(), 0)
    layer = Layer(case, torch.bfloat16)
    packed = layer.pack(kernels, kernels.linear.pack)
    together = layer.found(kernels, *packed)
    layer.x, layer.ids, layer.weights = layer.x[7:8], layer.ids[7:8], layer.weights[7:8]
    assert layer.found(kernels, *packed)[0].equal(together[7])


def test_more_rows_than_the_buffers_hold(kernels):
    """The rows need slices: a pair takes up to 24 KiB of the 64 MiB."""
    case = Case(1500, 16, 4096, 2, 2, Activation(), 0)
    layer = Layer(case, torch.bfloat16)
    layer.ids = torch.zeros_like(layer.ids).index_fill(1, torch.tensor([1]), 1)
    found = layer.found(kernels, *layer.pack(kernels, kernels.linear.pack))
    few = torch.tensor([0, 1, 700, 1498, 1499])
    layer.x, layer.ids, layer.weights = layer.x[few], layer.ids[few], layer.weights[few]
    expected = layer.expected(layer.up, layer.down)
    torch.testing.assert_close(found[few], expected, rtol=2e-2, atol=4e-2)
