"""Stateful layers: the CPU's kernels against the definition, and the definition against models."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import reference_states, states
from octavo.kernels.cpu import build
from octavo.kernels.cpu.native import NativeKernels
from tests.kernels.state_batches import (
    DTYPES,
    OPERATIONS,
    StateCase,
    Steps,
    check,
    compare,
    state_cases,
)
from tests.kernels.state_batches import build as build_call

pytestmark = pytest.mark.usefixtures("two_threads")

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
PREFILL, DECODE = (40, 40), (1, 9)
LARGE = {
    "causal_conv": {"size": 200, "per_row": 48},
    "ssd": {"heads": 2, "shared": 12, "size": 64, "state_size": 128},
    "gated_delta": {"heads": 2, "shared": 2, "size": 128, "state_size": 128},
    "selective_scan": {"size": 200, "per_row": 48},
}


@pytest.fixture(scope="session")
def native():
    return NativeKernels().states


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_as_defined(native, operation, data):
    check(native, data.draw(state_cases(operation)))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@given(data=st.data())
@settings(deadline=None, max_examples=1000)
def test_as_defined_widely(native, operation, data):
    check(native, data.draw(state_cases(operation, longest=200, most_size=136)))


@pytest.mark.few(4)
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sizes_of_models(native, operation, dtype):
    lengths = [PREFILL, DECODE, (17, 30), (1, 1), (3, 8), (0, 5), (1, 0)]
    every = frozenset({"bias", "d", "dt_bias", "softplus", "normalize", "silu"})
    case = StateCase(operation, lengths, dtype=dtype, options=every, **LARGE[operation])
    check(native, case)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_number_of_threads(native, operation, threads):
    torch.set_num_threads(threads)
    check(native, StateCase(operation, [PREFILL, DECODE, (2, 7)], **LARGE[operation]))


@needs_compiler
@pytest.mark.parametrize("options", [set(), {"elements"}])
def test_decays_to_nothing_and_of_nothing(native, options):
    """A chunk's sums of logarithms exceed the range of exponentials."""
    case = StateCase("gated_delta", [(70, 80)], size=32, state_size=32)
    case = replace(case, options=frozenset({"normalize", *options}))
    for g in (0.0, -5.0, -200.0):
        call = build_call(case)
        call.arguments[3].fill_(g)
        expected, found = (
            call.run(kernels, "gated_delta") for kernels in (reference_states, native)
        )
        for ours, theirs in zip(found, expected, strict=True):
            compare(ours, theirs, 2e-5)


@needs_compiler
@pytest.mark.parametrize("operation", OPERATIONS)
def test_refuses_a_block_that_does_not_exist(native, operation):
    call = build_call(StateCase(operation, [PREFILL, DECODE]))
    for bad in (99, -1):
        call.rows.tables[1, 0] = bad
        with pytest.raises(IndexError, match="a block of a state"):
            call.run(native, operation)


def test_refuses_rows_that_do_not_fit():
    call = build_call(StateCase("ssd", [PREFILL]))
    for change, message in (
        ({"first_row": 99}, "rows 99 to 101"),
        ({"tables": call.rows.tables.long()}, "int32"),
        ({"state": call.rows.state.half()}, "float32"),
        ({"state": call.rows.state.transpose(2, 3)}, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            states.ssd(*call.arguments, replace(call.rows, **change))


TOKENS = 150
CUTS = [[TOKENS], [64, 1, 1, 20, 2, 3, 59], [1] * TOKENS]
cut = pytest.mark.parametrize("cuts", CUTS, ids=["at once", "in chunks", "token by token"])


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def assert_same(found, expected):
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@cut
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolves_as_transformers(cuts, activation):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    x, weight, bias = numbers(TOKENS, 24), numbers(24, 4), numbers(24)
    expected = causal_conv1d_fn(x.T[None], weight, bias, activation=activation)[0].T
    steps = Steps("causal_conv", (8, 3), 3)
    found, state = steps.run(cuts, [x, weight, bias], {"activation": activation}, {0})
    assert_same(found, expected)
    assert torch.equal(state.flatten(0, 1), x[-3:].T)


@cut
def test_computes_mamba_2_as_transformers(cuts):
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    heads, groups, dim, size = 6, 2, 16, 32
    x, dt = numbers(TOKENS, heads, dim), numbers(TOKENS, heads)
    b, c = numbers(TOKENS, groups, size), 2 * numbers(TOKENS, groups, size)
    a, d, bias = -numbers(heads).exp(), numbers(heads), numbers(heads)
    options = {"dt_bias": bias, "dt_softplus": True}
    expected, expected_state = mamba2_chunk_scan(
        *(z[None] for z in (x, dt)),
        *(a, b[None], c[None], 64, d),
        **options,
        dt_limit=(0.1, 2.0),
        return_final_states=True,
    )
    found, state = Steps("ssd", (dim, size), heads).run(
        cuts, [x, dt, a, b, c], {**options, "d": d, "dt_limits": (0.1, 2.0)}, {0, 1, 3, 4}
    )
    assert_same(found, expected[0])
    assert_same(state, expected_state[0])


def test_decodes_mamba_2_as_transformers():
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    heads, groups, dim, size = 6, 2, 16, 32
    x, dt, bias = numbers(2, heads, dim), numbers(2, heads), numbers(heads)
    b, c = numbers(2, groups, size), 2 * numbers(2, groups, size)
    a, d = -numbers(heads).exp(), numbers(heads)
    steps = Steps("ssd", (dim, size), heads)
    options = {"d": d, "dt_bias": bias, "dt_softplus": True}
    _, before = steps.run([1], [x[:1], dt[:1], a, b[:1], c[:1]], options, {0, 1, 3, 4})
    found, state = steps.run([1, 1], [x, dt, a, b, c], options, {0, 1, 3, 4})
    expected = mamba2_selective_state_update(
        before[None],
        x[1:],
        dt[1:, :, None].expand(-1, -1, dim),
        a[:, None, None].expand(-1, dim, size),
        b[1:],
        c[1:],
        d[:, None].expand(-1, dim),
        dt_bias=bias[:, None].expand(-1, dim),
        dt_softplus=True,
    )
    assert_same(found[1:], expected)
    assert_same(state, before)


@cut
def test_computes_the_gated_delta_rule_as_transformers(cuts):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    key_heads, heads, key_dim, dim = 2, 4, 24, 40
    q, k = numbers(TOKENS, key_heads, key_dim), 2 * numbers(TOKENS, key_heads, key_dim)
    v, g = numbers(TOKENS, heads, dim), -numbers(TOKENS, heads).exp()
    beta = numbers(TOKENS, heads).sigmoid()
    expected, expected_state = torch_chunk_gated_delta_rule(
        *(z[None] for z in (q, k, v, g, beta)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, state = Steps("gated_delta", (key_dim, dim), heads).run(
        cuts, [q, k, v, g, beta], {"scale": key_dim**-0.5, "normalize": True}, set(range(5))
    )
    assert_same(found, expected[0])
    assert_same(state, expected_state[0])


@cut
def test_computes_kimi_delta_attention_as_transformers(cuts):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    heads, dim = 3, 24
    q, k = numbers(TOKENS, heads, dim), 2 * numbers(TOKENS, heads, dim)
    v, g = 3 * numbers(TOKENS, heads, dim), -(4 * numbers(TOKENS, heads, dim)).sigmoid()
    beta = numbers(TOKENS, heads).sigmoid()
    expected, expected_state = chunk_kimi_delta_attention(
        *(z[None] for z in (q, k, v, g, beta)),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, state = Steps("gated_delta", (dim, dim), heads).run(
        cuts, [q, k, v, g, beta], {"scale": dim**-0.5, "normalize": True}, set(range(5))
    )
    assert_same(found, expected[0])
    assert_same(state, expected_state[0])


@cut
def test_scans_as_transformers(cuts):
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    channels, size = 40, 16
    x, dt = numbers(TOKENS, channels), 2 * numbers(TOKENS, channels)
    b, c = numbers(TOKENS, size), 2 * numbers(TOKENS, size)
    a, d, bias = -numbers(channels, size).exp(), numbers(channels), numbers(channels)
    expected, expected_state = mamba_selective_scan(
        *(z.T[None] for z in (x, dt)),
        a,
        *(z.T[None] for z in (b, c)),
        d,
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    found, state = Steps("selective_scan", (20, size), 2).run(
        cuts, [x, dt, a, b, c], {"d": d, "dt_bias": bias, "dt_softplus": True}, {0, 1, 3, 4}
    )
    assert_same(found, expected[0].T)
    assert_same(state.flatten(0, 1), expected_state[0])


def test_computes_lightning_attention():
    """Linear attention with a constant decay per head, as in MiniMax."""
    heads, dim = 3, 16
    q, k, v = (scale * numbers(TOKENS, heads, dim) for scale in (1, 2, 3))
    rates = numbers(heads).exp() / 10
    position = torch.arange(TOKENS)
    distance = (position[:, None] - position).clamp(min=0)
    weights = torch.einsum("thk,shk->hts", q, k) * (-rates[:, None, None] * distance).exp()
    expected = torch.einsum("hts,shv->thv", weights.tril(), v)
    steps = torch.ones(TOKENS, heads)
    found, _ = Steps("ssd", (dim, dim), heads).run(
        CUTS[1], [v, steps, -rates, k, q], {}, {0, 1, 3, 4}
    )
    assert_same(found, expected)
