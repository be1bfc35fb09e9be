"""Models without weights have the properties of loaded ones."""

import json
import resource
from pathlib import Path

import pytest
import torch

from octavo.common.models.errors import ModelError
from octavo.common.resources import Memory
from octavo.engine.compilation.load_forward import _size
from octavo.engine.models import load_model, refusals
from octavo.engine.models.load_empty import load_empty
from octavo.engine.models.load_model import load
from octavo.engine.models.weights_size import sizes_by_quantization
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from octavo.engine.startup.model_report import report
from tests.architectures.entries import entries
from tests.architectures.serve import save
from tests.architectures.tiny import make_model, tiny_config
from tools import model_table

ROOT = Path(__file__).parents[3]
BY_NAME = {entry.name: entry for entry in entries()}
TABLE = {
    line.split("`")[1]: line
    for line in (ROOT / model_table.PLACE.document).read_text().splitlines()
    if line.startswith("| `") and "model_type" not in line
}
SERVED = ["llama", "gpt2", "gemma3_text", "qwen3_moe", "falcon_h1"]
REFUSED = ["bart", "doge", "inkling_text", "roberta"]
OPTIONS = {"device": "cpu", "block_size": 16}
GIB = 1 << 30


@pytest.mark.parametrize("name", SERVED)
def test_it_has_the_shape_of_the_loaded_model(name, tmp_path):
    save(BY_NAME[name], tmp_path)
    loaded = load(str(tmp_path), dtype="float32", **OPTIONS)
    empty = load_empty(str(tmp_path), dtype="float32", **OPTIONS)
    # generation_config.json may name end tokens; it needs no weights either.
    assert empty.shape.layers == loaded.shape.layers
    assert empty.shape.states == loaded.shape.states
    assert empty.shape.max_position == loaded.shape.max_position
    assert empty.shape.vocab_size == loaded.shape.vocab_size
    computed = dict(loaded.model.named_buffers())
    for buffer, ours in empty.model.named_buffers():
        if buffer.endswith("inv_freq"):
            assert torch.equal(ours, computed[buffer]), buffer


@pytest.mark.parametrize(
    "quantization",
    ["none", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "int4"))],
)
def test_weights_take_what_it_says(quantization, tmp_path):
    whole = {"hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256}
    config = tiny_config("qwen3_moe", whole | {"vocab_size": 2048, "tie_word_embeddings": True})
    make_model(config).save_pretrained(tmp_path)
    loaded = load(str(tmp_path), dtype="bfloat16", quantization=quantization, **OPTIONS)
    settings = EngineSettings(
        model=str(tmp_path), device="cpu", dtype="bfloat16", quantization=quantization
    )
    assert report(settings, GIB).weights == pytest.approx(_size(loaded.model), rel=0.05)


def test_a_large_model_takes_no_memory(tmp_path):
    config = json.loads(
        """{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 94, "vocab_size": 151936,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}"""
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    settings = EngineSettings(model=str(tmp_path), device="cpu", dtype="bfloat16")
    found = report(settings, 1000 * GIB)
    assert found.parameters == pytest.approx(235e9, rel=0.01)
    (group,) = found.groups
    assert (group.kind, group.layers, group.token_bytes) == ("attention", 94, 94 * 2 * 4 * 128 * 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIB >> 10
    with pytest.raises(StartupError, match="weights take about 43"):
        report(settings, 100 * GIB)


def test_the_cache_is_that_of_a_start(tmp_path):
    save(BY_NAME["gemma3_text"], tmp_path)
    settings = EngineSettings(
        model=str(tmp_path), device="cpu", dtype="float32", compile="off", cache_memory=0.01
    )
    parts, found = build(settings), report(settings)
    (budget,) = parts.limits.budgets
    assert found.blocks == budget.total_blocks
    assert found.block_bytes == parts.block_bytes
    assert found.max_model_len == parts.limits.max_model_len
    assert {group.kind for group in found.groups} == {"attention", "window"}
    assert sum(group.layers for group in found.groups) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_that_of_a_start(name, tmp_path):
    save(BY_NAME[name], tmp_path)
    settings = EngineSettings(model=str(tmp_path), device="cpu", compile="off")
    with pytest.raises(ModelError) as start:
        build(settings)
    with pytest.raises(ModelError) as told:
        report(settings)
    assert str(told.value) == str(start.value)


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_the_table_of_models_is_made_anew(name):
    assert model_table.row(BY_NAME[name]) == TABLE[name], "make docs"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_table_of_models_is_made_anew():
    text = (ROOT / model_table.PLACE.document).read_text()
    assert model_table.PLACE.insert(text, model_table.markdown()) == text, "make docs"


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    save(BY_NAME["llama"], tmp_path)
    model = load_empty(str(tmp_path), dtype="bfloat16", **OPTIONS).model
    small = sizes_by_quantization(model, torch.device("cpu"), None)["int8"]
    monkeypatch.delattr(load_model, "reference")
    for free, instead in ((small, "or --quantization int8"), (10, "or a smaller model")):
        monkeypatch.setattr(refusals, "memory_of", lambda _, free=free: Memory(free, free))
        with pytest.raises(ModelError, match=f"weights take about .* are free: .*{instead}"):
            load(str(tmp_path), dtype="bfloat16", **OPTIONS)
