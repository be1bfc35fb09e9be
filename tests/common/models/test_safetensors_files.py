"""Weights are read as in their index, or refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.common.models.safetensors_files import INDEX, WHOLE

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of several shards, and the same in one file."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory / "shards", max_shard_size="20KB")
    model.save_pretrained(directory / "whole")
    return directory


@pytest.fixture
def shards(saved, tmp_path):
    """A copy of the shards to break."""
    return shutil.copytree(saved / "shards", tmp_path / "model")


def index_of(directory):
    return json.loads((directory / INDEX).read_text())["weight_map"]


def add_to_shard(directory, shard, tensors):
    file = directory / shard
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def refused(directory, *words):
    with pytest.raises(ModelError) as caught:
        check_checkpoint(directory)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shards_and_whole_files_pass(saved):
    check_checkpoint(saved / "shards")
    check_checkpoint(saved / "whole")
    assert len(set(index_of(saved / "shards").values())) > 2


def test_a_stale_copy_in_another_shard_is_refused(shards):
    own = index_of(shards)[DOWN]
    other = next(file for file in sorted(set(index_of(shards).values())) if file != own)
    add_to_shard(shards, other, {DOWN: torch.zeros(32, 64)})
    refused(shards, DOWN, own, other)


def test_a_tensor_that_no_index_names_may_be_there_once(shards):
    first, second = sorted(set(index_of(shards).values()))[:2]
    add_to_shard(shards, first, {"model.rotary_emb.inv_freq": torch.ones(8)})
    check_checkpoint(shards)
    add_to_shard(shards, second, {"model.rotary_emb.inv_freq": torch.zeros(8)})
    refused(shards, "inv_freq", first, second)


def test_a_shard_without_a_tensor_of_the_index_is_refused(shards):
    file = shards / index_of(shards)[DOWN]
    save_file({k: v for k, v in load_file(file).items() if k != DOWN} or {"x": torch.ones(1)}, file)
    refused(shards, DOWN, file.name)


def test_weights_that_are_there_twice_are_refused(saved, shards):
    shutil.copy(saved / "whole" / WHOLE, shards / WHOLE)
    refused(shards, WHOLE, INDEX, min(index_of(shards).values()))
    for name in set(index_of(shards).values()):
        (shards / name).unlink()
    check_checkpoint(shards)  # of the others only the index remains


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("model-00001", "../model-00001"), ["'../model-00001"]),
        (lambda text: text.replace("model-00001", "/etc/model-00001"), ["'/etc/model-00001"]),
        (lambda text: text.replace(".safetensors", ".bin"), [".bin"]),
        (lambda text: text.replace('"weight_map": {', f'"weight_map": {{"{DOWN}": "x",'), [DOWN]),
        (lambda text: text.replace("weight_map", "weights"), ["not an index"]),
        (lambda _: '{"weight_map": {}}', ["lists none"]),
        (lambda _: '{"weight_map": {"a": 5}}', ["'5'"]),
        (lambda _: "[" * 100_000, ["not an index"]),
        (lambda text: text[:-40], ["not an index"]),
        (lambda text: text.replace("model-00001", "model-00009"), ["00009", "missing"]),
    ],
)
def test_an_index_that_misleads_is_refused(shards, change, words):
    text = (shards / INDEX).read_text()
    (shards / INDEX).write_text(change(text))
    refused(shards, *words)


@pytest.mark.parametrize("size", [0, 4, 100, -10])
def test_a_truncated_shard_is_refused(shards, size):
    file = shards / index_of(shards)[DOWN]
    file.write_bytes(file.read_bytes()[:size])
    refused(shards, file.name)
