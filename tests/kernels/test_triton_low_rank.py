"""Low-rank products in Triton against their definition: see `triton_device`."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.low_rank_batches import check_low_rank
from tests.kernels.triton_device import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS


@given(
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 90),
    ranks=st.lists(st.integers(0, 40) | st.just(256), min_size=1, max_size=4),
    num_rows=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=6 if INTERPRETED else 60)
def test_low_rank(**case):
    from octavo.kernels import triton as kernels

    check_low_rank(kernels, device=DEVICE, **case)
