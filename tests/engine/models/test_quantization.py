"""The layers that --quantization converts, reports as unquantized, and refuses."""

import json

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.bitnet import AutoBitLinear
from transformers.pytorch_utils import Conv1D

from octavo.common.models.errors import ModelError
from octavo.engine.models.linear.packed_linear import PackedLayer
from octavo.engine.models.linear.plain_linears import (
    check_quantizable,
    plain_linears,
    replace_conv1d,
)
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization import SCHEMES, find_scheme, schemes_for
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.calibration import calibration_tokens, run_alone
from octavo.engine.models.quantization.int8 import OneDnnInt8Linear
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.model_report import report
from tests.engine.random_model import save_random_model
from tests.plain import shape

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QUANTIZED = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": ["lm_head"],
}
CONFIGS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=500,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=256,
        eos_token_id=None,
        bos_token_id=None,
    ),
    "bitnet": lambda: BitNetConfig(**SMALL, intermediate_size=96),
    "experts": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
    "experts of an unknown kind": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, hidden_act="mish"),
}


@pytest.fixture
def saved(tmp_path):
    """Save a tiny model of a kind, without a tokenizer; return its directory."""

    def save(name):
        save_random_model(CONFIGS[name](), tmp_path / name, std=0.1)
        return tmp_path / name

    return save


def quantized(path, quantization, dtype="bfloat16"):
    return load(
        str(path), dtype=dtype, device="cpu", block_size=16, quantization=quantization
    ).model


def hidden_states(path, quantization, tokens):
    """Return the hidden states of the last layer, before the head."""
    loaded = load(
        str(path), dtype="float32", device="cpu", block_size=16, quantization=quantization
    )
    seen = []
    loaded.model.base_model.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    with torch.inference_mode():
        run_alone(loaded.model, loaded.shape, tokens)
    return seen[0]


@pytest.mark.parametrize("quantization", schemes_for(torch.device("cpu")))
def test_all_layers_of_gpt2_are_quantized(saved, quantization):
    model = quantized(saved("gpt2"), quantization)
    kinds = [
        module for module in model.modules() if isinstance(module, (PackedLayer, OneDnnInt8Linear))
    ]
    assert len(kinds) >= 2 * 4
    assert not [module for module in model.modules() if isinstance(module, Conv1D)]


@pytest.mark.parametrize("quantization", schemes_for(torch.device("cpu")))
def test_a_swiglu_in_float32_is_quantized(tmp_path, quantization):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    save_random_model(LlamaConfig(**sizes, **heads), tmp_path, std=0.1)
    model = quantized(tmp_path, quantization, "float32")
    assert any(isinstance(module, OneDnnInt8Linear) for module in model.modules())


def test_a_scheme_of_gpus_is_refused_on_a_cpu(saved):
    path = saved("gpt2")
    with pytest.raises(ModelError, match="fp8 works on GPUs only: use int8 or int4"):
        quantized(path, "fp8")
    with pytest.raises(ModelError, match="fp8 works on GPUs only"):
        report(EngineSettings(model=str(path), device="cpu", quantization="fp8"))
    assert schemes_for(torch.device("cpu")) == ["int8", "int4"]
    assert schemes_for(torch.device("cuda")) == list(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_registered_scheme_is_a_choice(name):
    assert isinstance(find_scheme(name), Scheme)
    assert EngineSettings(model="some", quantization=name).quantization == name


def test_unregistered_schemes_are_refused():
    assert find_scheme("none") is None
    with pytest.raises(KeyError, match="no quantization scheme 'int3': use none, int8"):
        find_scheme("int3")
    with pytest.raises(ValidationError, match="'none', 'int8'"):
        EngineSettings(model="some", quantization="int3")


def test_gpt2_in_8_bits_says_nearly_what_it_says_in_32(saved):
    path = saved("gpt2")
    tokens = torch.arange(3, 67)
    exact, rounded = (hidden_states(path, kind, tokens) for kind in ("none", "int8"))
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05  # above 0, since 8 bits round


def test_a_conv1d_is_the_linear_layer_it_becomes():
    torch.manual_seed(0)
    parent = nn.Sequential(Conv1D(6, 4))
    nn.init.normal_(parent[0].bias)
    x = torch.randn(3, 4)
    expected = parent(x)
    replace_conv1d(parent)
    assert type(parent[0]) is nn.Linear
    torch.testing.assert_close(parent(x), expected)


def test_a_model_that_is_quantized_already_is_refused(saved):
    path = saved("bitnet")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    with torch.compiler.set_stance("force_eager"):  # its layers compile when called
        with pytest.raises(ModelError, match=r"quantized \(bitnet\): --quantization int8 is"):
            quantized(path, "int8")
        model = quantized(path, "none")
    layers = [module for module in model.modules() if isinstance(module, AutoBitLinear)]
    assert len(layers) == 2 * 7, "they round their inputs, so none is packed as a plain one"


class Rounding(nn.Linear):
    """Rounds its inputs, as BitNet's layers do."""

    def forward(self, x):
        return super().forward((x * 4).round() / 4)


class Same(nn.Linear):
    """Computes the same differently, as Falcon's layers do."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(2)


def test_layers_are_known_by_what_they_compute():
    given = [nn.Linear(8, 4), Rounding(8, 4), Same(8, 4), Router(8, 4), nn.ReLU()]
    assert plain_linears(nn.Sequential(*given)) == {given[0], given[2]}


def test_a_model_with_layers_that_round_is_refused():
    model = AutoModelForCausalLM.from_config(CONFIGS["bitnet"]())
    check_quantizable(model, "some", "int4")
    model.lm_head = Router(64, 500)
    check_quantizable(model, "some", "int4")
    model.lm_head = Rounding(64, 500)
    with pytest.raises(ModelError, match="some has Rounding layers, which are not plain linear"):
        check_quantizable(model, "some", "int4")


@pytest.mark.parametrize(
    ("name", "left"), [("experts", []), ("experts of an unknown kind", [{"Qwen3MoeExperts"}])]
)
def test_experts_that_stay_as_they_are_are_told(saved, name, left):
    with capture_logs() as logs:
        build(EngineSettings(model=str(saved(name)), quantization="int8", num_blocks=16))
    told = [entry for entry in logs if "some layers are not quantized" in entry["event"]]
    assert [set(entry["percent_of_weights"]) for entry in told] == left


@pytest.mark.few(2)
@pytest.mark.parametrize("tokenizer", [None, "{}", '{"version": "1.0", "model": {"type": "BPE"}}'])
@pytest.mark.parametrize("name", ["gpt2", "experts"])
def test_calibration_does_without_a_tokenizer(saved, name, tokenizer):
    path = saved(name)
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer)
    assert quantized(path, "int8")


def test_calibration_stays_within_the_vocabulary(demo_model):
    small = shape(1, 1, 1, 32, 600, 512)
    assert int(calibration_tokens(str(demo_model), small).max()) < 600
