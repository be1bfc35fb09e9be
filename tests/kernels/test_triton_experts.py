"""Mixtures of experts in Triton against their definition: see `triton_device`."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.kernels import quantized, reference
from octavo.kernels.activation import Activation
from tests.kernels.conftest import activations
from tests.kernels.quantized_weights import KINDS, moved, random_weight
from tests.kernels.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@given(
    rows=st.integers(1, 30) | st.just(150),
    hidden=st.integers(1, 160),
    inner=st.integers(1, 90),
    num_experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    activation=activations,
    biased=st.booleans(),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
@example(  # more rows of an expert than a tile has
    rows=150,
    hidden=70,
    inner=90,
    num_experts=2,
    chosen=3,
    activation=Activation(),
    biased=True,
    transposed=True,
    dtype=torch.bfloat16,
    seed=0,
)
@settings(deadline=None, max_examples=3 if INTERPRETED else 50)
def test_experts(
    rows, hidden, inner, num_experts, chosen, activation, biased, transposed, dtype, seed
):
    from octavo.kernels.triton.experts import experts

    draw = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=draw)

    def weights(outputs, inputs):
        if transposed:
            made = (randn(num_experts, inputs, outputs) / inputs**0.5).transpose(1, 2)
        else:
            made = randn(num_experts, outputs, inputs) / inputs**0.5
        return made.to(dtype).to(DEVICE)

    def bias(outputs):
        return randn(num_experts, outputs).to(dtype).to(DEVICE) if biased else None

    projected = inner * (2 if activation.gated else 1)
    wide = torch.full((rows, hidden + 8), torch.nan)
    wide[:, 4:-4] = randn(rows, hidden)
    x = wide.to(dtype).to(DEVICE)[:, 4:-4]
    ids = torch.randint(-1, num_experts + 1, (rows, chosen), generator=draw).to(DEVICE)
    shares = torch.rand((rows, chosen), generator=draw).to(DEVICE)
    layer = (weights(projected, hidden), bias(projected), weights(hidden, inner), bias(hidden))
    found = experts(x, ids, shares, *layer, activation)
    assert found.dtype == dtype
    wide_layer = [None if own is None else own.float() for own in layer]

    def between(projected):
        """Round activations between the products, as the kernel does."""
        result = activation(projected)
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter truncates instead
            return (result.view(torch.int32) & -0x10000).view(torch.float32)
        return result.to(dtype).float()

    expected = reference.experts(x.float(), ids, shares, *wide_layer, between)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=4e-2)


@given(
    rows=st.integers(1, 30) | st.just(150),
    hidden=st.integers(1, 300),
    inner=st.integers(1, 150),
    num_experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    activation=activations,
    biased=st.booleans(),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 2),
    group=st.sampled_from([16, 32, 128, 1 << 20]),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 999),
)
@example(
    rows=150,
    hidden=70,
    inner=90,
    num_experts=2,
    chosen=3,
    activation=Activation(),
    biased=True,
    kinds=("points", "nested"),
    group=32,
    dtype=torch.bfloat16,
    seed=0,
)
@settings(deadline=None, max_examples=3 if INTERPRETED else 100)
def test_quantized_experts(
    rows, hidden, inner, num_experts, chosen, activation, biased, kinds, group, dtype, seed
):
    from octavo.kernels.triton import quantized_experts

    draw = torch.Generator().manual_seed(seed)
    projected = inner * (2 if activation.gated else 1)
    up = random_weight(kinds[0], num_experts * projected, hidden, group, draw)
    down = random_weight(kinds[1], num_experts * hidden, inner, group, draw)
    apart = torch.full((rows, hidden + 8), torch.nan)
    apart[:, 4:-4] = torch.randn((rows, hidden), generator=draw)
    x = apart.to(dtype)[:, 4:-4]
    ids = torch.randint(-1, num_experts + 1, (rows, chosen), generator=draw)
    shares = torch.rand((rows, chosen), generator=draw)
    biases = [
        torch.randn((num_experts, outputs), generator=draw).to(dtype) if biased else None
        for outputs in (projected, hidden)
    ]
    expected = quantized.quantized_experts(
        *(x.float(), ids, shares, up, biases[0], down, biases[1], activation)
    )

    def there(own):
        return None if own is None else own.to(DEVICE)

    found = quantized_experts(
        *(there(x), there(ids), there(shares), moved(up, DEVICE), there(biases[0])),
        *(moved(down, DEVICE), there(biases[1]), activation),
    )
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        found.float().cpu(), expected, rtol=tolerance, atol=tolerance * (1 + expected.abs().max())
    )
