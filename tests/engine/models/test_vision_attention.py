"""Attention of images in tiles is PyTorch's, with and without a kernel for it."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from octavo.engine.attention.ragged import TILED_ATTENTION
from octavo.kernels import cpu  # noqa: F401 - it has the operators

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("tokens", "size"), [(70, 64), (257, 72), (33, 20)])
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_attend_to_themselves(dtype, tokens, size, masked):
    torch.manual_seed(0)
    rows = torch.randn(3, 2, tokens, 3, size, dtype=dtype)  # as towers lay them out
    query, key, value = (x.transpose(1, 2) for x in rows)
    mask = torch.rand(2, 1, tokens, tokens) < 0.7 if masked else None
    module = torch.nn.Module()
    module.is_causal = False
    given = module, query, key, value, mask
    tiled = AttentionInterface()[TILED_ATTENTION](*given, scaling=0.1)[0]
    expected = sdpa_attention_forward(*given, scaling=0.1)[0]
    assert tiled.shape == expected.shape == (2, tokens, 3, size)
    torch.testing.assert_close(tiled, expected, atol=TOLERANCES[dtype], rtol=0.05)
