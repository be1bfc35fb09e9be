"""Layers of experts: which are recognized, and that models' outputs do not change."""

import pytest
import torch
from transformers import GptOssConfig, MiniMaxM3VLTextConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octavo.engine.models.experts.expert_layer import ExpertLayer, recognize
from octavo.engine.models.experts.grouped_experts import GroupedExperts
from octavo.engine.models.experts.interface import EXPERTS, REPLACEMENT
from octavo.engine.models.experts.packed_experts import PackedExperts, packed
from octavo.engine.models.load_model import load
from octavo.kernels.activation import Activation
from tests.architectures.tiny import make_model, tiny_config

EVEN_HEADS = {"qk_nope_head_dim": 16, "qk_head_dim": 32}
MODELS = {
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": EVEN_HEADS,
    "olmoe": {},
    "granitemoe": {},
}
"""Model types, with extra settings of their tiny configs."""
SHRUNK = 0.4
ROUNDINGS = [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]
SIZES = {"hidden_size": 64, "num_local_experts": 6}


def gpt_oss():
    return GptOssExperts(GptOssConfig(**SIZES, intermediate_size=32))


def minimax():
    return MiniMaxM3VLExperts(MiniMaxM3VLTextConfig(**SIZES, intermediate_size=32))


def nemotron():
    config = NemotronHConfig(hidden_size=64, n_routed_experts=6, moe_intermediate_size=32)
    return NemotronHExperts(config)


def qwen(hidden_act="silu"):
    config = Qwen3MoeConfig(
        hidden_size=64, num_experts=6, moe_intermediate_size=32, hidden_act=hidden_act
    )
    return Qwen3MoeExperts(config)


LAYERS = {
    "gpt-oss": (gpt_oss, Activation("silu", True, 1.702, 7.0, 1.0)),
    "MiniMax M3": (minimax, Activation("silu", True, 1.702, 7.0, 1.0)),
    "Nemotron-H": (nemotron, Activation("relu_squared", False)),
    "SwiGLU": (qwen, Activation()),
    "GELU": (lambda: qwen("gelu"), Activation("gelu")),
    "GELU by tanh": (lambda: qwen("gelu_pytorch_tanh"), Activation("gelu_tanh")),
}


def layer_of(make):
    """Return a layer of experts with random weights."""
    module = make()
    module.config._experts_implementation = EXPERTS
    draw = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw)
        parameter.data *= 8**-0.5 if parameter.dim() > 2 else 1.0
    activation = recognize(module)
    return module, activation and ExpertLayer("", module, activation)


def inputs(rows=23):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn((rows, 64), generator=draw)
    scores = torch.rand((rows, 6), generator=draw)
    weights, ids = scores.softmax(-1).topk(2)
    return x, ids, weights


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("replacement", [packed, GroupedExperts])
@torch.inference_mode()
def test_a_layer_is_recognized_and_computes_the_same(name, replacement):
    make, activation = LAYERS[name]
    module, layer = layer_of(make)
    assert layer.activation == activation
    expected = module(*inputs())
    layer.replace(replacement(layer))
    assert not list(module.parameters(recurse=False))
    torch.testing.assert_close(module(*inputs()), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_is_not_recognized():
    assert layer_of(lambda: qwen("mish"))[1] is None
    module = qwen()
    module.has_post_expert_norm = True
    assert recognize(module) is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tiny model of a type once; return its directory."""
    paths = {}

    def save(model_type):
        if model_type not in paths:
            paths[model_type] = path = tmp_path_factory.mktemp(model_type)
            model = make_model(tiny_config(model_type, MODELS[model_type]))
            for name, weights in model.named_parameters():
                # Otherwise small rounding errors route many tokens to other experts.
                weights.data *= SHRUNK if weights.dim() > 1 and "embed" not in name else 1
            model.save_pretrained(path)
        return str(paths[model_type])

    return save


FAST = [("mixtral", "float32", "none"), ("granitemoe", "bfloat16", "none")]
SLOW = [(name, *rounding) for name in MODELS for rounding in ROUNDINGS]


@pytest.mark.parametrize(
    ("model_type", "dtype", "quantization"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST)],
)
def test_models_pass_the_self_check_with_packed_experts(saved, model_type, dtype, quantization):
    loaded = load(
        saved(model_type), dtype=dtype, device="cpu", block_size=16, quantization=quantization
    )
    layers = [own for own in loaded.model.modules() if hasattr(own, "is_transposed")]
    assert layers
    for layer in layers:
        assert isinstance(getattr(layer, REPLACEMENT), PackedExperts)
        assert not list(layer.parameters())
