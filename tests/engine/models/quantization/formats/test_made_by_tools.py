"""Weights packed by the formats' own tools are dequantized as by these tools."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.common.models.quantized import Statement
from octavo.engine.models.quantization.formats import make_format
from octavo.engine.models.quantization.formats.base import TensorHeader

FILES = sorted((Path(__file__).parent / "made_by_tools").glob("*.safetensors"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_tools_weights(file):
    opened = safe_open(file, "pt")
    settings = json.loads(opened.metadata()["settings"])
    names = [name for name in opened.keys() if name != "expected"]  # noqa: SIM118
    headers = {
        name: TensorHeader(own.get_dtype(), tuple(own.get_shape()))
        for name in names
        for own in (opened.get_slice(name),)
    }
    found = make_format(Statement("config.json", settings["quant_method"], settings))
    expected = opened.get_tensor("expected").float()
    assert found.check("layer", headers) == tuple(expected.shape)
    weight = found.read("layer", {name: opened.get_tensor(name) for name in names}).dequantize()
    if file.stem.startswith(("ct_", "gguf_")):
        assert weight.equal(expected)
    else:  # in float16
        torch.testing.assert_close(weight, expected, rtol=2**-10, atol=1e-7)


def test_mxfp4_is_what_transformers_makes_of_it():
    draw = torch.Generator().manual_seed(0)
    parts = {
        "blocks": torch.randint(256, (2, 24, 3, 16), generator=draw, dtype=torch.uint8),
        "scales": torch.randint(110, 140, (2, 24, 3), generator=draw, dtype=torch.uint8),
    }
    own = make_format(Statement("config.json", "mxfp4", {"quant_method": "mxfp4"}))
    expected = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
    assert own.read("layer", parts).dequantize().equal(expected)


def test_all_tools_are_here():
    assert {file.stem.partition("_")[0] for file in FILES} == {"awq", "ct", "gguf", "gptq"}
