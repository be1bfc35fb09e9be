"""Reads `adapter_model.safetensors`, as peft writes it, and checks it against the model.

Nothing here computes with PyTorch: this runs beside the steps, and PyTorch would keep a thread pool
for the calling thread.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, deserialize, safe_open

from octavo.common.models.checkpoint import ADAPTER_CONFIG
from octavo.common.models.errors import ModelError
from octavo.common.models.safetensors_files import PICKLED, check_file
from octavo.engine.lora.config import MAX_RANK, AdapterConfig, read_config
from octavo.engine.lora.errors import AdapterError
from octavo.engine.lora.targets import Targets
from octavo.engine.models.linear.adapted_layers import Target
from octavo.kernels.low_rank import make_record

WEIGHTS = "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
"""Pattern of a matrix's name: A maps a layer's inputs to `rank` values, B maps these to outputs."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
ALIGNMENT = 32
"""Alignment of matrices, in elements."""
BLANK_RANK = 16
SHOWN = 5
"""Maximum names listed in a message."""


class Matrices(NamedTuple):
    """An adapter's part of a layer, from its file.

    Attributes:
        layer: The layer's name.
        target: The layer.
        rank: Rows of A and columns of B.
        scale: Scale of the product.
    """

    layer: str
    target: Target
    rank: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter's matrices in memory.

    Attributes:
        matrices: `[elements]` of the targets' dtype: each layer's A, `[rank, inputs]`, and B,
            transposed to `[rank, outputs]` or packed: see `octavo.kernels.low_rank.LowRankPart`.
        records: `[indices of targets, RECORD]` int64, as for
            `octavo.kernels.low_rank.LowRankBatch`, with A's and B's offsets in bytes instead of
            their addresses.
        max_rank: The highest rank.
        digest: Digest of the adapter's files.
    """

    matrices: torch.Tensor
    records: np.ndarray
    max_rank: int
    digest: str

    def records_at(self, address: int) -> np.ndarray:
        """Return the records of matrices at an address."""
        placed = self.records.copy()
        placed[placed[:, 2] > 0, :2] += address
        return placed


def read_adapter(directory: Path, targets: Targets) -> AdapterWeights:
    """Read an adapter and check it.

    Args:
        directory: Directory in the form of peft's `save_pretrained`.
        targets: The model's layers.

    Raises:
        AdapterError: It cannot be read, is not supported, or does not fit the model.
    """
    config = read_config(directory)
    file = directory / WEIGHTS
    if not file.is_file():
        raise AdapterError(_absent(directory))
    try:
        check_file(file)
        with safe_open(file, framework="np") as opened:
            parts = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118
            names = list(opened.keys())
            shapes = {
                name: (part.get_dtype(), tuple(part.get_shape()))
                for name, part in zip(names, parts, strict=True)
            }
        layers = _check(file, config, shapes, targets)
        content = file.read_bytes()
        tensors = dict(deserialize(content))  # type: ignore[no-untyped-call]
    except ModelError as error:
        raise AdapterError(str(error)) from error
    except (SafetensorError, OSError, MemoryError, RecursionError, ArithmeticError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    stated = (directory / ADAPTER_CONFIG).read_bytes()
    digest = hashlib.blake2b(stated + hashlib.blake2b(content).digest(), digest_size=16)

    def values(layer: str, part: str) -> np.ndarray:
        name = f"base_model.model.{layer}.lora_{part}.weight"
        return _values(file, name, tensors[name], targets.dtype)

    return lay_out(layers, values, targets, digest.hexdigest())


def blank_weights(targets: Targets) -> AdapterWeights:
    """Return the weights of an adapter that adapts every layer and changes no output."""
    records = targets.make_records()
    widest = max(
        (max(target.inputs, _width(target)) for target in targets.layers.values()), default=0
    )
    matrix = torch.zeros(BLANK_RANK * widest, dtype=targets.dtype, pin_memory=targets.pinned)
    for target in targets.layers.values():
        records[target.index] = make_record(0, 0, BLANK_RANK, 1.0)  # all share the same memory
    return AdapterWeights(matrix, records, BLANK_RANK, digest="")


def _absent(directory: Path) -> str:
    """Return the reason why the weights of a directory cannot be read."""
    held = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
    if pickled := [name for name in held if name.endswith(PICKLED)]:
        return (
            f"{directory} has no {WEIGHTS}; {pickled[0]} is a pickle, which can run code when"
            " loaded, and is not read: save the adapter again with a current peft"
        )
    return f"{directory} has no {WEIGHTS}: it is not an adapter in peft's format"


def _check(
    file: Path,
    config: AdapterConfig,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    targets: Targets,
) -> list[Matrices]:
    """Check names and shapes; return an adapter's matrices of own layers, in their order."""
    shapes_by_layer: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in shapes.items():
        named = NAME.fullmatch(name)
        if named is None:
            raise AdapterError(f"{file}: {name} is not a matrix of LoRA, {_hint(name)}")
        if dtype not in DTYPES:
            raise AdapterError(f"{file}: {name} is {dtype}; it must be {', '.join(DTYPES)}")
        if len(shape) != 2:
            raise AdapterError(f"{file}: {name} has shape {list(shape)}, and is no matrix")
        shapes_by_layer.setdefault(named["layer"], {})[named["part"]] = shape
    if not shapes_by_layer:
        raise AdapterError(f"{file} has no tensors")
    base = f"; the adapter was made for {config.base!r}" if config.base else ""
    known = {**targets.elsewhere, **targets.layers}
    if unknown := sorted(set(shapes_by_layer) - set(known)):
        raise AdapterError(
            f"{file} adapts {', '.join(unknown[:SHOWN])}{' ...' if len(unknown) > SHOWN else ''},"
            f" which is no linear layer of the model that adapters may adapt{base}"
        )
    try:
        layers = [
            _check_layer(config, layer, parts, known[layer])
            for layer, parts in shapes_by_layer.items()
        ]
    except AdapterError as error:
        raise AdapterError(f"{file}: {error}{base}") from error
    own = (each for each in layers if each.layer in targets.layers)
    return sorted(own, key=lambda matrices: matrices.target.index)


def _hint(name: str) -> str:
    """Return a hint about a tensor that is not a LoRA matrix."""
    if name.endswith(("base_layer.weight", "embed_tokens.weight", "lm_head.weight")):
        return (
            "but the base model's, and Octavo keeps one base for all: save the adapter with"
            " peft's save_pretrained(save_embedding_layers=False)"
        )
    return "and Octavo applies these alone"


def _check_layer(
    config: AdapterConfig, layer: str, shapes: Mapping[str, tuple[int, ...]], target: Target
) -> Matrices:
    """Return a layer's matrices.

    Raises:
        AdapterError: One is missing, or its shape does not fit the model and the config.
    """
    rank = config.rank_of(layer)
    inputs, outputs = target.sizes
    expected = {"A": (rank, inputs), "B": (outputs, rank)}
    for part, needed in expected.items():
        if part not in shapes:
            raise AdapterError(f"lora_{part} of {layer} is missing")
        if shapes[part] != needed:
            raise AdapterError(
                f"lora_{part} of {layer} has shape {list(shapes[part])}; the model and rank {rank}"
                f" of the adapter's config need {list(needed)}"
            )
    assert rank <= MAX_RANK
    return Matrices(layer, target, rank, config.scale_of(layer))


def lay_out(
    layers: Sequence[Matrices],
    values: Callable[[str, str], np.ndarray],
    targets: Targets,
    digest: str,
) -> AdapterWeights:
    """Pack all matrices of an adapter into one tensor for the kernels.

    Args:
        layers: Its layers.
        values: Returns a whole matrix in float32, by the names of the layer and of the matrix (A
            or B).
        targets: The model's layers.
        digest: Digest of the adapter's files.
    """
    size = sum(
        _aligned(each.rank * each.target.inputs) + _aligned(each.rank * _width(each.target))
        for each in layers
    )
    matrices = torch.empty(size, dtype=targets.dtype, pin_memory=targets.pinned)
    whole = _as_array(matrices)
    records = targets.make_records()
    offset = 0
    for layer, target, rank, scale in layers:
        down, up = values(layer, "A"), values(layer, "B")
        if (part := target.part) is not None:
            down, up = down[:, part.inputs], up[part.outputs]
        places = []
        for matrix in (_in_order(down, target, targets), _in_panels(up.T, target)):
            places.append(offset * matrices.itemsize)
            whole[offset : offset + matrix.size] = _convert(matrix, targets.dtype).reshape(-1)
            offset += _aligned(matrix.size)
        records[target.index] = make_record(places[0], places[1], rank, scale)
    return AdapterWeights(matrices, records, max((each.rank for each in layers), default=1), digest)


def _width(target: Target) -> int:
    """Return the number of a layer's outputs, padded to its packed layer's panels."""
    placement = target.placement
    return (
        target.outputs if placement is None else placement.panels(target.outputs) * placement.lanes
    )


def _in_order(down: np.ndarray, target: Target, targets: Targets) -> np.ndarray:
    """Return A, `[rank, inputs]`, with its columns in the packed layer's order."""
    placement = target.placement
    return (
        down
        if placement is None or placement.order < 0
        else down[:, list(targets.orders[placement.order])]
    )


def _in_panels(up: np.ndarray, target: Target) -> np.ndarray:
    """Return B transposed, `[rank, outputs]`, in the packed layer's panels if it has one."""
    placement = target.placement
    if placement is None:
        return up
    after = _width(target) - placement.shift - target.outputs
    padded = np.pad(up, ((0, 0), (placement.shift, after)))
    return padded.reshape(len(up), -1, placement.lanes).transpose(1, 0, 2)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _values(file: Path, name: str, stored: Mapping[str, Any], dtype: torch.dtype) -> np.ndarray:
    """Return a tensor in float32.

    Raises:
        AdapterError: It has NaN or infinity, or would have them in the model's dtype.
    """
    raw = np.frombuffer(stored["data"], DTYPES[stored["dtype"]]).reshape(stored["shape"])
    if stored["dtype"] == "BF16":
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.astype(np.float32)
    if not np.isfinite(values).all():
        raise AdapterError(f"{file}: {name} has NaN or infinity")
    if np.abs(values).max() > torch.finfo(dtype).max:
        kind = str(dtype).removeprefix("torch.")
        raise AdapterError(f"{file}: {name} has numbers too large for {kind}, the model's type")
    return values


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory; bfloat16 as 16-bit integers, since NumPy lacks bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _convert(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return float32 values in `_as_array`'s form of a dtype; rounded to nearest, ties to even."""
    if dtype != torch.bfloat16:
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)
