"""Attention within whole texts: the C++ kernel gives the reference's results.

Instructions that this CPU lacks are emulated, as in test_linear.py.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.attention import ragged  # noqa: F401 - defines the operator
from octavo.kernels import reference
from tests.kernels.conftest import TOLERANCES
from tests.kernels.test_linear import CPUS, emulated


@pytest.fixture(scope="module", params=CPUS)
def attend(request, tmp_path_factory):
    """Yield the kernel for a kind of CPU."""
    if request.param == "native":
        yield torch.ops.octavo.ragged_attention
        return
    with emulated(request.param, tmp_path_factory) as (operators, _):
        yield lambda *call: operators.ragged_attention(*call[:-1], int(call[-1]))


@given(
    lengths=st.lists(st.integers(0, 20) | st.integers(0, 700), min_size=1, max_size=4).filter(any),
    heads=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7])),
    widths=st.tuples(*[st.integers(1, 16).map(lambda units: 8 * units)] * 2),
    dtype=st.sampled_from(list(TOLERANCES)),
    reach=st.just(-1) | st.integers(0, 130),
    causal=st.booleans(),
    seed=st.integers(0, 1 << 31),
)
def test_the_kernel_computes_its_definition(
    attend, lengths, heads, widths, dtype, reach, causal, seed
):
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group = heads
    rows = sum(lengths)

    def draw(num_heads, width):
        # Views of a wider tensor, as fused products give them.
        wide = torch.randn((rows, num_heads, width + 8), generator=generator, dtype=torch.float32)
        return wide.to(dtype)[..., :width]

    query, key = draw(kv_heads * group, widths[0]), draw(kv_heads, widths[0])
    value = draw(kv_heads, widths[1])
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    arguments = (query, key, value, starts, widths[0] ** -0.5, reach, causal)
    computed = attend(*arguments)
    expected = reference.ragged_attention(*arguments)
    assert computed.dtype == dtype
    torch.testing.assert_close(
        computed.float(), expected.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_same_bits_alone_and_among_others(attend, dtype):
    query = torch.randn((900, 2, 32)).to(dtype)
    starts = torch.tensor([0, 100, 840, 900], dtype=torch.int32)
    together = attend(query, query, query, starts, 0.2, -1, False)
    own = query[100:840]
    alone = attend(own, own, own, torch.tensor([0, 740], dtype=torch.int32), 0.2, -1, False)
    assert torch.equal(together[100:840], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_larger_batch_is_not_read(attend, dtype):
    nan = torch.full((128, 1, 32), math.nan, dtype=dtype)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    attend(nan, nan, nan, starts, 0.2, -1, False)
    query = torch.randn((7, 1, 32)).to(dtype)
    starts = torch.tensor([0, 7], dtype=torch.int32)
    computed = attend(query, query, query, starts, 0.2, -1, False)
    assert not computed.isnan().any()


@pytest.mark.parametrize("starts", [[0, 3], [1, 4], [0, 5, 4], [0]])
def test_texts_that_do_not_hold_each_token_once_are_refused(attend, starts):
    query = torch.randn((4, 1, 32))
    with pytest.raises(ValueError, match="texts must"):
        attend(query, query, query, torch.tensor(starts, dtype=torch.int32), 0.2, -1, False)
