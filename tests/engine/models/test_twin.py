"""A small model of the same type checks a large model's structure."""

import os
from unittest.mock import Mock

import pytest
import structlog.testing
import torch

from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.engine.models import load_model
from octavo.engine.models.checks import self_check, twin_check, widened
from octavo.engine.models.checks.reference import PASSES
from octavo.engine.models.checks.self_check import SelfCheckError
from octavo.engine.models.checks.twin import make_twin
from octavo.engine.models.empty_model import make_empty
from tests.architectures.serve import save
from tests.architectures.tiny import tiny_config
from tests.engine.models.test_self_check import (
    ALONE,
    BY_NAME,
    change_positions,
    ignore_masks,
    load_tiny,
    scale_attention,
)

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "falcon_h1")


@pytest.fixture(autouse=True)
def _every_model_is_large(tmp_path, monkeypatch):
    monkeypatch.setattr(widened, "SMALL", 0)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FAMILIES)
def test_right_models_pass(name, tmp_path):
    save(BY_NAME[name], tmp_path)
    with structlog.testing.capture_logs() as logs:
        load_tiny(tmp_path, dtype="bfloat16")
    passed = [line["dtype"] for line in logs if line["event"] == "self-check passed"]
    assert passed == ["float32", "bfloat16"]
    assert not [line for line in logs if "twin" in line["event"]]


def outcome(directory):
    try:
        load_tiny(directory, dtype="bfloat16")
    except ModelError as error:
        return str(error)
    return "served"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in BY_NAME.items() if entry.has_model])
def test_what_is_served_does_not_depend_on_the_size(name, tmp_path, monkeypatch):
    save(BY_NAME[name], tmp_path)
    large = outcome(tmp_path)
    monkeypatch.setattr(widened, "SMALL", 1 << 30)
    assert large == outcome(tmp_path)


def test_a_twin_is_small_and_has_layers_of_each_kind():
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 3
    changes = {"num_hidden_layers": 12, "intermediate_size": 4096, "layer_types": kinds}
    config = tiny_config("gemma3_text", changes)
    twin = make_twin(make_empty(config, torch.bfloat16))
    assert twin.config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert twin.config.intermediate_size == 128
    assert len(config.layer_types) == 12


def test_other_positions_are_refused(tmp_path, monkeypatch):
    save(BY_NAME["llama"], tmp_path)
    change_positions(monkeypatch)
    with pytest.raises(SelfCheckError, match=f"{ALONE}.* in float32"):
        load_tiny(tmp_path, dtype="bfloat16")


def test_another_mask_is_refused(tmp_path, monkeypatch):
    save(BY_NAME["gemma3_text"], tmp_path)
    ignore_masks(monkeypatch)
    with pytest.raises(SelfCheckError, match=f"{ALONE}.* in float32"):
        load_tiny(tmp_path, dtype="bfloat16")


def test_another_scale_of_attention_is_refused(tmp_path, monkeypatch):
    save(BY_NAME["llama"], tmp_path)
    reference = twin_check.reference

    def reference_of_another(model, *arguments):
        expected = reference(model, *arguments)
        scale_attention(model.model.layers[1].self_attn)
        return expected

    monkeypatch.setattr(twin_check, "reference", reference_of_another)
    with pytest.raises(SelfCheckError, match=f"{ALONE}.* in float32"):
        load_tiny(tmp_path, dtype="bfloat16")


def test_rounding_is_measured_only_as_often_as_needed(tmp_path, monkeypatch):
    save(BY_NAME["llama"], tmp_path)
    monkeypatch.setattr(self_check, "SIXTEEN_BIT_TOLERANCE", 0.5)
    loaded = load_tiny(tmp_path, dtype="bfloat16")
    assert not loaded.check.expected.rounding.any()
    monkeypatch.setattr(self_check, "SIXTEEN_BIT_TOLERANCE", 0.0)
    rounded = load_tiny(tmp_path, dtype="bfloat16").check.expected
    passes = rounded.rounding.reshape(-1, len(rounded.logits))
    assert 1 <= len(passes) <= PASSES
    assert passes.any(1).all()


def relations(model, quantization):
    with structlog.testing.capture_logs() as logs:
        load_tiny(model, dtype="bfloat16", quantization=quantization)
    (line,) = (line for line in logs if line["event"] == "self-check passed")
    return {"alone", "packed", "chunked", "routed"} & line.keys()


def test_what_a_model_must_compute_is_remembered(tmp_path, monkeypatch):
    model = tmp_path / "model"
    save(BY_NAME["mixtral"], model)
    first = load_tiny(model, dtype="bfloat16").check.expected
    with monkeypatch.context() as patch:
        patch.delattr(load_model, "reference")
        patch.delattr(twin_check, "make_twin")
        second = load_tiny(model, dtype="bfloat16").check.expected
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.rounding, second.rounding)
    assert len(second.choices) == len(first.choices) > 0
    assert relations(model, "none") == {"alone", "routed"}
    assert "packed" in relations(model, "int8")
    assert "packed" not in relations(model, "int8")

    monkeypatch.setattr(load_model, "reference", Mock(side_effect=NotImplementedError("again")))
    for changed in ("float16", "bfloat16"):
        if changed == "bfloat16":
            weights = model / "model.safetensors"
            os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
        with pytest.raises(UnsupportedModelError, match="again"):
            load_tiny(model, dtype=changed)


def test_nothing_is_remembered_of_a_model_that_does_not_pass(tmp_path, monkeypatch):
    model = tmp_path / "model"
    save(BY_NAME["llama"], model)
    load_tiny(model, dtype="bfloat16")
    (kept,) = (tmp_path / "cache" / "references").iterdir()
    with monkeypatch.context() as patch:
        change_positions(patch)
        with pytest.raises(SelfCheckError):
            load_tiny(model, dtype="bfloat16")
    assert not kept.exists()
    load_tiny(model, dtype="bfloat16")
    kept.write_bytes(b"damaged")
    load_tiny(model, dtype="bfloat16")
    assert len(kept.read_bytes()) > 100
