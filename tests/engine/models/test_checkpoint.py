"""Truncated weights, LFS pointers and pickles are refused before any is loaded."""

import json
import os
import pickle
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from octavo.common.models.errors import ModelError
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def refused(path, why):
    with pytest.raises(ModelError, match=why) as caught:
        build(EngineSettings(model=str(path), num_blocks=8, swap_space=0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 5, 200, 0.5, -1])
def test_truncated_weights_are_refused(model, kept):
    weights = model / WEIGHTS
    size = weights.stat().st_size
    os.truncate(weights, int(kept * size) if 0 < kept < 1 else kept % size)
    refused(model, f"^{re.escape(str(weights))} is truncated: it has .* bytes.*Download")


def test_weights_with_something_behind_them_are_refused(model):
    with (model / WEIGHTS).open("ab") as file:
        file.write(b"rest of another file")
    refused(model, "is damaged: it has .* bytes, but its header states")


@pytest.mark.parametrize(
    "header", [b"{}}", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [], "dtype": "F32"}}']
)
def test_a_header_that_cannot_be_read_is_refused(model, header):
    (model / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    refused(model, "is not a safetensors file: its header cannot be read")


class Malice:
    def __reduce__(self):
        return os.mkdir, ("malice",)


def test_pickled_weights_are_neither_run_nor_loaded(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malice()))
    refused(model, "no safetensors files; pytorch_model.bin is a pickle.*: convert it")
    assert not (tmp_path / "malice").exists()


@pytest.fixture
def sharded(model):
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    index = {}
    for name in weights:
        index[name] = f"part-{len(index) % 2}.safetensors"
    for part in set(index.values()):
        own = {name: weights[name] for name in weights if index[name] == part}
        save_file(own, model / part, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return model


def test_each_part_is_checked(sharded):
    assert build(EngineSettings(model=str(sharded), num_blocks=8, swap_space=0))
    part = sharded / "part-1.safetensors"
    os.truncate(part, part.stat().st_size - 1)
    refused(sharded, "part-1.safetensors is truncated")
    part.unlink()
    refused(sharded, f"part-1.safetensors is missing, one of 2 files in {INDEX}")
    (sharded / INDEX).write_text("{")
    refused(sharded, f"{INDEX} is not an index of safetensors files")


def with_tensors(model, **tensors):
    """Add tensors to a model's weights."""
    weights = load_file(model / WEIGHTS)
    save_file(weights | tensors, model / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("name", ["bias", "weight_scale", "lora_A"])
def test_tensors_of_a_layer_that_its_code_does_not_use_are_refused(model, name):
    """transformers ignores them, and the model would produce nonsense."""
    with_tensors(model, **{f"{LAYER}.{name}": torch.ones(64)})
    refused(model, f"has 1 tensors that its model's code does not use, such as {LAYER}.{name}")


def test_weights_of_another_part_are_told_and_not_used(model):
    with_tensors(model, **{"vision_tower.weight": torch.ones(4), f"{LAYER}.k_scale": torch.ones(1)})
    with capture_logs() as logs:
        assert build(EngineSettings(model=str(model), num_blocks=8, swap_space=0))
    (told,) = [entry for entry in logs if "does not use some of its weights" in entry["event"]]
    assert told["count"] == 2
