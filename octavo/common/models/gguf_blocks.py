"""Keeps a GGUF file's weights in the file's own blocks, in a converted model's directory.

transformers renames a file's tensors and reorders the rows of some. A tensor is known again by its
rows' numbers, whatever their order; only where these are exactly a weight's is the weight replaced
by the tensor's bytes, its rows in the weight's order. All other weights stay floats.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.common.models.files import CONFIG
from octavo.common.models.weight_files import WHOLE

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""GGUF's types that have kernels."""
ENDING = ".blocks"
"""What follows a layer's name in the name of its bytes."""
WEIGHT = ".weight"
METHOD = "gguf"
PART_ROWS = 4096
"""Rows that are hashed at once."""


def packed_types(reader: Any) -> set[str]:  # noqa: ANN401 - gguf has no types
    """Return those of a file's types that the kernels take."""
    return {own.tensor_type.name for own in reader.tensors} & set(BLOCK_TYPES)


def keep_blocks(directory: Path, reader: Any, dtype: Any) -> None:  # noqa: ANN401
    """Replace the weights of a converted model by the file's blocks, where they are the same.

    Args:
        directory: The model's, with all weights in float32 in one file; it is changed.
        reader: Of the GGUF file.
        dtype: What other matrices become; vectors stay in float32.
    """
    import torch  # noqa: PLC0415 - seconds to import, once in a model's life
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    weights = load_file(directory / WHOLE)
    matrices = {
        name: weight
        for name, weight in weights.items()
        if name.endswith(WEIGHT) and weight.dim() == 2 and weight.dtype == torch.float32
    }
    kinds: dict[str, str] = {}
    stored: dict[str, Any] = {}
    for name, (kind, rows) in _find_blocks(reader, matrices).items():
        layer = name.removesuffix(WEIGHT)
        kinds[layer], stored[layer + ENDING] = kind, rows
    for name, weight in weights.items():
        if name.removesuffix(WEIGHT) not in kinds:
            stored[name] = weight if weight.dim() < 2 else weight.to(dtype)
    made = directory / f"{WHOLE}.new"
    save_file(stored, made, metadata={"format": "pt"})
    del weights, matrices
    made.replace(directory / WHOLE)
    config = json.loads((directory / CONFIG).read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    if kinds:
        config["quantization_config"] = {"quant_method": METHOD, "weights": kinds}
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _find_blocks(reader: Any, matrices: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:  # noqa: ANN401
    """Return the type and bytes, `[outputs, bytes]`, of the matrices that are a file's tensors."""
    import gguf  # noqa: PLC0415 - rarely needed
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    hashes = {name: _row_hashes(matrix) for name, matrix in matrices.items()}
    alike = defaultdict(list)
    for name, own in hashes.items():
        alike[matrices[name].shape, int(own.sum())].append(name)
    found: dict[str, tuple[str, Any]] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in BLOCK_TYPES or len(tensor.shape) != 2:
            continue
        exact = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        own = _row_hashes(exact)
        places = own.argsort(stable=True)
        for name in alike.get((exact.shape, int(own.sum())), ()):
            order = torch.empty_like(places)
            order[hashes[name].argsort(stable=True)] = places
            if torch.equal(exact[order], matrices[name]):
                found[name] = kind, torch.from_numpy(np.array(tensor.data))[order]
    return found


def _row_hashes(matrix: Any) -> Any:  # noqa: ANN401
    """Return a number of each row's bits, `[rows]` int64."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, matrix.shape[1:], generator=generator)
    parts = matrix.contiguous().view(torch.int32).split(PART_ROWS)
    return torch.cat([(part.long() * factors).sum(1) for part in parts])
