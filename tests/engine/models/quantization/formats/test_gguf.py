"""GGUF files with weights in blocks give the logits of transformers with dequantized weights."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.gguf.tensor_locations import TensorLocations
from octavo.engine.models.deferred import hold
from octavo.engine.models.load_model import load
from octavo.engine.models.quantization.formats.block_layers import (
    BlockWeights,
    PackedBlocksEmbedding,
    PackedBlocksLinear,
    embedding_factor,
)
from octavo.engine.models.read_weights import load_weights, read_config
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.kernels.cpu.blocks import FORMATS, dequantize
from tests.common.models import tiny_gguf
from tests.engine.models.quantization.formats.test_quantized_checkpoints import (
    error,
    served_logits,
)

WIDTH, INNER, LAYERS = 256, 512, 2
HEADS, KV_HEADS = 2, 1  # 128, which transformers assumes for qwen3 regardless of the file
HEAD = WIDTH // HEADS
VOCABULARY = len(tiny_gguf.TOKENS)
SHAPES = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (KV_HEADS * HEAD, WIDTH),
    "attn_v": (KV_HEADS * HEAD, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
EXPERTS, EXPERT_INNER = 4, 256  # not the width of transformers' default
EXPERT_SHAPES = {
    "ffn_gate_exps": (EXPERTS, EXPERT_INNER, WIDTH),
    "ffn_up_exps": (EXPERTS, EXPERT_INNER, WIDTH),
    "ffn_down_exps": (EXPERTS, WIDTH, EXPERT_INNER),
}
SCALES = {
    "Q4_0": (0.02,),
    "Q4_1": (0.02, -0.15),
    "Q5_0": (0.01,),
    "Q5_1": (0.01, -0.15),
    "Q8_0": (0.001,),
    "Q4_K": (0.0003, 0.0024),
    "Q5_K": (0.00015, 0.0024),
    "Q6_K": (0.0001,),
}
"""Scales that make weights of random bytes near 0.1."""


def all_of(kind):
    return lambda name: kind


def q4_k_m(name):
    """Return the type of a tensor in llama.cpp's mix: some have more bits."""
    if name in {"token_embd", "blk.1.attn_v", "blk.1.ffn_down"}:
        return "Q6_K"
    return "Q4_K"


def with_others(name):
    """Gate and up have two types, and some layers stay floats."""
    kinds = {"blk.0.ffn_gate": "Q5_1", "blk.0.attn_v": "F16", "blk.1.ffn_up": "IQ4_NL"}
    return kinds.get(name, "Q8_0")


CASES = {
    "llama": {
        **{kind: all_of(kind) for kind in FORMATS},
        "Q4_K_M": q4_k_m,
        "with others": with_others,
    },
    "qwen2": {"Q4_1": all_of("Q4_1"), "Q8_0": all_of("Q8_0"), "Q4_K_M": q4_k_m},
    "qwen3": {"Q4_1": all_of("Q4_1"), "Q8_0": all_of("Q8_0"), "Q4_K_M": q4_k_m},
}


def random_matrix(draw, kind, shape):
    """Return a matrix as in the file."""
    if kind == "F16":
        return (0.1 * draw.normal(size=shape)).astype(np.float16)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    units = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    places = (208,) if kind == "Q6_K" else (0, 2)
    for at, scale in zip(places, SCALES.get(kind, (0.001,)), strict=False):
        scales = (scale * draw.uniform(0.5, 1.5, (*units.shape[:-1], 1))).astype(np.float16)
        units[..., at : at + 2] = scales.view(np.uint8)
    return units.reshape(*shape[:-1], -1)


def write(path, family, kind_of, untied=False, architecture=None):
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    tiny_gguf._add_tokenizer(writer)
    shapes = SHAPES
    if family == "qwen3moe":
        shapes = {name: SHAPES[name] for name in SHAPES if "ffn" not in name} | EXPERT_SHAPES
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_INNER)

    def matrix(name, shape):
        kind = kind_of(name)
        writer.add_tensor(f"{name}.weight", random_matrix(draw, kind, shape), raw_dtype=Kind[kind])

    def vector(name, size, middle=1.0):
        values = middle + 0.1 * draw.normal(size=size)
        writer.add_tensor(name, values.astype(np.float32), raw_dtype=Kind.F32)

    matrix("token_embd", (VOCABULARY, WIDTH))
    if untied:
        matrix("output", (VOCABULARY, WIDTH))
    vector("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            matrix(f"blk.{layer}.{name}", shape)
            if family == "qwen2" and name in {"attn_q", "attn_k", "attn_v"}:
                vector(f"blk.{layer}.{name}.bias", shape[0], 0.0)
        vector(f"blk.{layer}.attn_norm.weight", WIDTH)
        vector(f"blk.{layer}.ffn_norm.weight", WIDTH)
        if family == "qwen3moe":
            vector(f"blk.{layer}.ffn_gate_inp.weight", (EXPERTS, WIDTH), 0.0)
        if "qwen3" in family:
            vector(f"blk.{layer}.attn_q_norm.weight", HEAD)
            vector(f"blk.{layer}.attn_k_norm.weight", HEAD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))


def transformers_logits(file, tokens, dtype, **changes):
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        config=config,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    with torch.inference_mode():
        return model(tokens[None]).logits[0].float()


def loaded_as(dtype, path):
    return load(path, dtype=dtype, device="cpu", block_size=16)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family, cases in CASES.items() for case in cases]
)
def test_served_logits_are_those_of_the_dequantized_weights(tmp_path, family, case):
    file = write(tmp_path / "tiny.gguf", family, CASES[family][case], untied=case == "Q8_0")
    path = resolve(str(file), packed=True)
    check_checkpoint(Path(path))
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    expected = transformers_logits(file, tokens, torch.float32)
    wide = loaded_as("float32", path)
    if case == "with others":  # float types other than bfloat16 become bfloat16 in the cache
        assert error(served_logits(wide, tokens), expected) < 5e-3
    else:
        assert error(served_logits(wide, tokens), expected) < 1e-5
    with capture_logs() as logs:
        narrow = loaded_as("auto", path)
    assert narrow.dtype == torch.bfloat16
    told = next(entry for entry in logs if entry["event"] == "quantized weights")
    assert told["as_stored_percent"] == 100
    kinds = [type(layer) for layer in narrow.model.modules()]
    assert PackedBlocksEmbedding in kinds
    assert PackedBlocksLinear in kinds
    found = served_logits(narrow, tokens)
    assert 0 < error(found, expected) < 0.04  # inputs rounded to bytes
    assert served_logits(narrow, tokens[:8]).equal(found[:8])


def test_experts_are_read_whatever_their_width(tmp_path):
    file = write(tmp_path / "tiny.gguf", "qwen3moe", q4_k_m)
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    expected = transformers_logits(
        file, tokens, torch.float32, moe_intermediate_size=EXPERT_INNER, head_dim=HEAD
    )
    found = served_logits(loaded_as("float32", resolve(str(file), packed=True)), tokens)
    assert error(found, expected) < 1e-2  # experts are bfloat16 in the cache


def test_weights_that_the_models_class_lacks_are_refused(tmp_path):
    """transformers ignores them, so its results are no reference for a self-check."""
    biased = write(tmp_path / "tiny.gguf", "qwen2", q4_k_m, architecture="llama")
    with pytest.raises(UnsupportedModelError, match=r"1,024 of its numbers are weights, such as b"):
        resolve(str(biased), packed=True)
    with pytest.raises(UnsupportedModelError, match="that LlamaForCausalLM of transformers does"):
        resolve(str(biased))


def weight_bytes(model):
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_apply_to_all_weights_in_blocks(tmp_path, dtype):
    """The start checks a trial adapter of all layers, the head too."""
    file = write(tmp_path / "tiny.gguf", "llama", q4_k_m, untied=True)
    settings = EngineSettings(
        model=str(file), dtype=dtype, enable_lora=True, compile="off", num_blocks=64
    )
    parts = build(settings)
    layers = parts.adapters._targets.layers
    assert sum(name.endswith("lm_head") for name in layers) == 1
    assert all(layer.placement is not None for layer in layers.values())


@pytest.mark.parametrize("case", ["Q4_1", "Q8_0", "Q4_K_M"])
def test_weights_take_no_more_than_the_file(tmp_path, case):
    file = write(tmp_path / "tiny.gguf", "llama", CASES["llama"][case])
    tensors = sum(own.n_bytes for own in gguf.GGUFReader(file).tensors)
    loaded = loaded_as("bfloat16", resolve(str(file), packed=True))
    assert weight_bytes(loaded.model) <= 1.25 * tensors


def test_both_forms_are_kept_apart(tmp_path):
    file = str(write(tmp_path / "tiny.gguf", "llama", q4_k_m))
    packed, plain = resolve(file, packed=True), resolve(file)
    assert packed != plain
    assert "quantization_config" not in json.loads((Path(plain) / "config.json").read_text())
    assert loaded_as("bfloat16", plain).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32])
def test_floats_are_read_where_they_are(tmp_path, kind):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", kind=kind)
    directory = resolve(str(file), packed=True)
    assert "model.layers.0.mlp.up_proj.weight" in TensorLocations.read(Path(directory)).tensors
    own, other = (loaded_as("float32", path) for path in (directory, resolve(str(file))))
    tokens = torch.arange(40)
    assert torch.equal(served_logits(own, tokens), served_logits(other, tokens))
    own, other = (
        load_weights(path, read_config(path, quantized=False), None, dtype="auto")
        for path in (directory, resolve(str(file)))
    )
    assert own.dtype == other.dtype
    hold(own)
    assert all(map(torch.equal, own.state_dict().values(), other.state_dict().values()))


def test_only_the_cache_names_other_files(tmp_path):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    own = Path(resolve(str(file), packed=True))
    assert TensorLocations.read(own).tensors
    downloaded = shutil.copytree(own, tmp_path / "model")
    assert not TensorLocations.read(downloaded).tensors
    with pytest.raises(ModelError, match="k_proj has no blocks: download"):
        loaded_as("bfloat16", str(downloaded))


def test_damaged_blocks_are_refused(tmp_path):
    file = write(tmp_path / "tiny.gguf", "llama", q4_k_m)
    path = Path(resolve(str(file), packed=True))
    places = TensorLocations.read(path)
    name = "model.layers.0.mlp.up_proj.blocks"
    number, place = places.tensors[name]
    cut = replace(place, shape=(place.shape[0], place.shape[1] - 1))
    replace(places, tensors={**places.tensors, name: (number, cut)}).write(path)
    with pytest.raises(ModelError, match=r"up_proj has 143 bytes an output, which Q4_K does not"):
        loaded_as("bfloat16", str(path))
    places.write(path)
    with file.open("r+b") as opened:
        opened.seek(place.offset)
        opened.write(b"\xff" * 144)
    with pytest.raises(ModelError, match="up_proj has non-finite values in scales"):
        loaded_as("bfloat16", str(path))
    with file.open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(ModelError, match=r"tiny.gguf, the source of .*, is missing or has changed"):
        loaded_as("bfloat16", str(path))
    os.truncate(file, file.stat().st_size - 4)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weights"]["model.layers.0.mlp.up_proj"] = "Q9_K"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="weights of type 'Q9_K', which Octavo"):
        loaded_as("bfloat16", str(path))


class Shifted(torch.nn.Embedding):
    embed_scale = torch.tensor(3.0)

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_that_are_scaled_stay_in_blocks(dtype):
    own, draw = FORMATS["Q6_K"], np.random.default_rng(0)
    rows = torch.from_numpy(random_matrix(draw, "Q6_K", (VOCABULARY, WIDTH)))
    scaled = Gemma3TextScaledWordEmbedding(VOCABULARY, WIDTH, 0, WIDTH**0.5 + 0.1)
    scaled.weight = torch.nn.Parameter(dequantize(rows, own).to(dtype))
    factor = embedding_factor(scaled)
    assert factor is not None
    packed = BlockWeights.of(rows, own).pack()
    ids = torch.tensor([[0, 5], [VOCABULARY - 1, 5]])
    found = PackedBlocksEmbedding(WIDTH, dtype, packed, own.number, factor)(ids)
    assert torch.equal(found, scaled(ids))
    assert embedding_factor(Shifted(8, 4)) is None
    assert embedding_factor(torch.nn.Embedding(8, 4)) == 1
