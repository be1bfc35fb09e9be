"""Operators fused into the kernels compute the same, and most models have them."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from octavo.engine.compilation.fusion import fuse
from octavo.engine.compilation.norms import RMS_NORM
from octavo.engine.compilation.trace import trace
from octavo.engine.compilation.traced_forward import TracedForward
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization.calibration import BLOCK_SIZE
from octavo.kernels.cpu import linear as kernels
from tests.engine.models.test_architectures import SMALL, save
from tests.engine.one_prompt import logits

pytestmark = pytest.mark.skipif(kernels is None, reason="there is no C++ compiler")

LAYERS = 2
TOKENS = 21
SHAPE = SMALL | {"num_hidden_layers": LAYERS, "intermediate_size": 72}
OPERATORS = {
    "norms": RMS_NORM,
    "norms in parts": torch.ops.aten.rsqrt.default,
    "gates": torch.ops.aten.silu.default,
    "rotations": torch.ops.aten.neg.default,
    "residuals": torch.ops.aten.add.Tensor,
}
LAST_NORM = {"norms": 1}
"""The norm is not before a linear layer: only some tokens' rows go on."""


@pytest.mark.parametrize(
    ("config", "left"),
    [
        pytest.param(LlamaConfig(**SHAPE), LAST_NORM, id="llama"),
        pytest.param(Qwen2Config(**SHAPE), LAST_NORM, id="biases"),
        # The results of the heads' norms, two per layer, are rotated.
        pytest.param(Qwen3Config(**SHAPE), {"norms": 1 + 2 * LAYERS}, id="query and key norms"),
        pytest.param(Gemma2Config(**SHAPE), None, id="norms of another kind"),
        pytest.param(GPTNeoXConfig(**{**SHAPE, "hidden_size": 128}), None, id="partial rotary"),
    ],
)
def test_fused_is_unfused(config: PretrainedConfig, left, tmp_path):
    save(config, tmp_path)
    loaded = load(str(tmp_path), dtype="bfloat16", device="cpu", block_size=BLOCK_SIZE)
    tokens = torch.randint(1, 500, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    inputs = (tokens, torch.arange(TOKENS)[None], torch.tensor([3, TOKENS - 1]))
    step = EagerForward(loaded.model)
    fused = TracedForward(step, loaded.shape.vocab_size, loaded.dtype)
    found, expected = (logits(one, loaded.shape, inputs).float() for one in (fused, step))
    assert (found - expected).norm() <= 0.03 * expected.norm()
    if left is not None:
        traced = trace(step, loaded.shape.vocab_size)
        fuse(traced.graph)
        counts = {
            name: len(traced.graph.find_nodes(op="call_function", target=operator))
            for name, operator in OPERATORS.items()
        }
        assert {name: count for name, count in counts.items() if count} == left
