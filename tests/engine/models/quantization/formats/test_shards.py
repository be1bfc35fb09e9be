"""A shard of a stored weight has the same values as that shard of the dequantized weight."""

from itertools import product

import numpy as np
import pytest
import torch

from octavo.common.models.quantized import Statement
from octavo.engine.models.quantization.formats import make_format
from octavo.engine.models.quantization.formats.base import Floats
from octavo.engine.models.quantization.formats.block_layers import block_weights
from octavo.engine.models.quantization.formats.gguf import Blocks
from octavo.engine.models.quantization.formats.mxfp4 import Mxfp4
from octavo.engine.models.quantization.formats.packing import for_kernels
from octavo.engine.models.quantization.gpu_weight import stored_weight
from octavo.engine.models.shard import Shard
from octavo.kernels.cpu.blocks import FORMATS
from octavo.kernels.quantized import dequantize
from tests.engine.models.quantization.formats import packers, test_gguf
from tests.engine.models.quantization.formats.test_quantized_checkpoints import CASES

OUTPUTS, INPUTS = 96, 192
RANGES = {
    -2: [(1, 0, 48), (1, 48, 48), (1, 5, 7), (2, 12, 24), (3, 16, 16)],
    -1: [(1, 0, 96), (1, 96, 96), (1, 64, 128), (1, 32, 64), (1, 7, 50), (2, 48, 48)],
}
SHARDS = [Shard(dim, *where) for dim, ranges in RANGES.items() for where in ranges]
ALIGNED = [Shard(-2, 1, 48, 48), Shard(-2, 2, 12, 24), Shard(-1, 1, 0, 96), Shard(-1, 1, 96, 96)]
"""Shards for kernels: groups of 64 split in the middle become groups of 32."""


def stored(name):
    settings, pack, _ = CASES[name]
    torch.manual_seed(0)
    parts, exact = pack(torch.randn(OUTPUTS, INPUTS))
    made = make_format(Statement("config.json", settings["quant_method"], settings))
    weight = made.read("model.layers.0.self_attn.q_proj", parts)
    assert torch.equal(weight.dequantize(), exact.float())
    return weight


def same_part(weight, shard):
    part = weight.shard(shard)
    assert torch.equal(part.dequantize(), shard.take(weight.dequantize())), (type(part), shard)
    return part


@pytest.mark.parametrize("name", CASES)
def test_a_part_has_the_values_of_the_whole(name):
    weight = stored(name)
    for shard in SHARDS:
        part = same_part(weight, shard)
        for again in SHARDS[:1] if shard.dim == -1 else ():
            same_part(part, again)


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16 zeros", "gptq 2 bits", "w8a8"])
def test_kernels_take_parts_that_whole_groups_make(name):
    weight = stored(name)
    for shard in ALIGNED:
        part = for_kernels(weight.shard(shard))
        assert part is not None, shard


def assert_same_on_gpus(part):
    """Check that GPU kernels dequantize a shard to the same values, if they support it."""
    if (weight := stored_weight(part)) is not None:
        values = torch.empty_like(part.dequantize())
        columns = slice(None) if weight.order is None else weight.order
        values[:, columns] = dequantize(weight.weight).float()
        torch.testing.assert_close(values, part.dequantize(), rtol=2e-3, atol=2e-3)
    return weight is not None


@pytest.mark.parametrize("name", CASES)
def test_gpus_unpack_the_values_of_a_part(name):
    taken = [assert_same_on_gpus(stored(name).shard(shard)) for shard in ALIGNED]
    assert all(taken[:2])  # parts of outputs have whole groups


def test_permuted_groups_of_unequal_size_are_left_to_floats():
    weight = stored("gptq order")
    assert for_kernels(weight.shard(ALIGNED[0])) is not None
    assert weight.shard(ALIGNED[2]).group_size is None
    assert for_kernels(weight.shard(ALIGNED[2])) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_part_of_blocks_stays_in_blocks_between_units(kind, ordered):
    rows = test_gguf.random_matrix(np.random.default_rng(0), kind, (OUTPUTS, 1024))
    order = torch.randperm(OUTPUTS) if ordered else None
    weight = Blocks(torch.from_numpy(rows.view(np.uint8)), FORMATS[kind], order)
    for shard in (*SHARDS[:5], Shard(-1, 1, 512, 512), Shard(-1, 1, 256, 256)):
        part = same_part(weight, shard)
        assert isinstance(part, Blocks)
        assert block_weights(part, torch.bfloat16) is not None
        assert assert_same_on_gpus(part)
    assert isinstance(same_part(weight, Shard(-1, 1, 8, 40)), Floats)


def test_a_part_of_experts_stays_in_e2m1_between_groups():
    parts, exact = packers.mxfp4(torch.randn(4, OUTPUTS, INPUTS))
    weight = Mxfp4({"quant_method": "mxfp4"}).read("model.layers.0.mlp.experts.down_proj", parts)
    assert torch.equal(weight.dequantize(), exact.transpose(1, 2).float())
    for dim, where in product((-1, -2), [(1, 0, 32), (1, 32, 64), (2, 0, 16)]):
        part = same_part(weight, Shard(dim, *where))
        assert isinstance(part, Floats) == (dim == -2 and where[0] == 2)
    assert isinstance(same_part(weight, Shard(-2, 1, 16, 32)), Floats)
    assert len(same_part(weight, Shard(-3, 1, 2, 2)).codes) == 2
