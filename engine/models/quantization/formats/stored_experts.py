"""Finds the experts of a layer in a quantized checkpoint."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.quantization.formats.base import ScaledE2m1, StoredWeight
from octavo.engine.models.read_weights import QuantizedCheckpoint
from octavo.engine.models.shard import Shard

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of an expert's products in checkpoints."""

StoredExpert = tuple[Sequence[StoredWeight], StoredWeight]
"""An expert's weights: of the first product, gates before up projections, and of the second."""


def stored_experts(checkpoint: QuantizedCheckpoint, layer: ExpertLayer) -> Iterator[StoredExpert]:
    """Yield the stored experts of a layer, in order.

    It ends early at an expert that is not in the checkpoint, or whose dequantized weights differ
    from the layer's.

    Args:
        checkpoint: The checkpoint.
        layer: The layer, with dequantized weights.
    """
    if layer.activation.gated:
        for number, expert in enumerate(_read(checkpoint, layer)):
            if number == layer.count or not _same(layer, number, *expert):
                return
            yield expert


def are_stored(checkpoint: QuantizedCheckpoint, path: str) -> bool:
    """Return whether a checkpoint has the quantized experts of the layer at a path."""
    whole = _joined_names(path)
    return all(name in checkpoint.shapes for name in whole) or bool(expert_names(checkpoint, path))


def _joined_names(path: str) -> list[str]:
    """Return the names of the weights of all experts of a layer, stored as two tensors."""
    return [f"{path}.{name}" for name in ("gate_up_proj", "down_proj")]


def _read(checkpoint: QuantizedCheckpoint, layer: ExpertLayer) -> Iterator[StoredExpert]:
    whole = _joined_names(layer.path)
    if all(name in checkpoint.shapes for name in whole):
        up, down = map(_part, map(checkpoint.read, whole), layer.shards)
        if isinstance(up, ScaledE2m1) and isinstance(down, ScaledE2m1):
            for number in range(len(up.codes)):
                weights = up.expert(number)
                first = (layer.gates_first(part, 1) for part in (weights.codes, weights.exponents))
                yield [ScaledE2m1(*first)], down.expert(number)
        return
    experts = expert_names(checkpoint, layer.path)
    up_shard, down_shard = layer.shards
    if up_shard is not None and up_shard.dim == -3:  # whole experts
        experts = experts[up_shard.start : up_shard.start + up_shard.length]
        up_shard = down_shard = None
    elif up_shard is not None:  # gates and up projections are apart
        up_shard = replace(up_shard, groups=1)
    for gate, up_name, down_name in experts:
        ups = [_part(checkpoint.read(name), up_shard) for name in (gate, up_name)]
        yield ups, _part(checkpoint.read(down_name), down_shard)


def _part(weight: StoredWeight, shard: Shard | None) -> StoredWeight:
    return weight if shard is None else weight.shard(shard)


def _same(layer: ExpertLayer, number: int, ups: Sequence[StoredWeight], down: StoredWeight) -> bool:
    """Return whether an expert's weights equal the layer's."""
    first = torch.cat([_dequantized(weight) for weight in ups]).to(layer.dtype)
    second = _dequantized(down).to(layer.dtype)
    return torch.equal(first, layer.up(number).cpu()) and torch.equal(
        second, layer.down(number).cpu()
    )


def _dequantized(stored: StoredWeight) -> Tensor:
    """Return an expert's weights, `[outputs, inputs]` float32."""
    weight = stored.dequantize()
    return weight[0].t() if isinstance(stored, ScaledE2m1) else weight


def expert_names(checkpoint: QuantizedCheckpoint, path: str) -> list[tuple[str, str, str]]:
    """Return the names of the weights of a layer's experts, in order.

    Args:
        checkpoint: The checkpoint.
        path: The layer's name in the model. Its block may have another name in the checkpoint.
    """
    number = re.search(r"\.(\d+)\.", path)
    if number is None:
        return []
    for names in NAMES:
        pattern = re.compile(rf"(.*\.{number[1]}\.[^.]+(?:\.experts)?)\.0\.{names[0]}\.weight")
        for prefix in {
            match[1] for name in checkpoint.shapes if (match := pattern.fullmatch(name))
        }:
            experts: list[tuple[str, str, str]] = []
            while f"{prefix}.{len(experts)}.{names[0]}.weight" in checkpoint.shapes:
                gate, up, down = (f"{prefix}.{len(experts)}.{name}.weight" for name in names)
                experts.append((gate, up, down))
            if all(name in checkpoint.shapes for expert in experts for name in expert):
                return experts
    return []
