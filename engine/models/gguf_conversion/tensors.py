"""Finds the GGUF file's tensors from which a model's weights are computed.

transformers knows llama.cpp's names of its weights, and undoes the changes of llama.cpp's
converter: it reorders rows, joins the experts' products, subtracts one from norms. This module
finds a tensor's changes by passing row numbers to transformers: if it only moves rows, a weight is
the tensor's rows in another order, in any type.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from octavo.kernels.cpu import dequantize_blocks
from octavo.kernels.cpu.blocks import FORMATS

MIN_DIMENSIONS = 2
"""Minimum number of dimensions of a tensor with rows."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a model.

    Attributes:
        name: Its name in transformers.
        tensors: Its tensors in the file, from `gguf.GGUFReader`.
        is_rows: Whether it consists of the rows of one tensor.
        order: The tensor's row for each row of the weight; None if they are in order.
        numbers: Returns the weight as a tensor of floats.
    """

    name: str
    tensors: tuple[Any, ...]
    is_rows: bool
    order: Any | None
    numbers: Callable[[], Any]


class _Names:
    """How transformers renames and converts the tensors of one GGUF file.

    Args:
        architecture: Its name in the file.
        config: The file's settings that transformers reads.
        model: A model of its class without weights.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any], model: Any) -> None:  # noqa: ANN401
        from transformers import modeling_gguf_pytorch_utils as gguf_utils  # noqa: PLC0415

        kinds: Mapping[str, Any] = gguf_utils.TENSOR_PROCESSORS
        self._processor = kinds.get(architecture, gguf_utils.TensorProcessor)(config=dict(config))
        self._names = gguf_utils.get_gguf_hf_weights_map(model, self._processor)

    def process(self, name: str, numbers: Any, made: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
        """Return the weights that a tensor contributes to, by name.

        Args:
            name: The tensor's name.
            numbers: Its values, or others of its shape.
            made: The weights from other tensors.
        """
        parsed = {"tensors": dict(made)}
        processed = self._processor.process(
            weights=numbers, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )
        if processed.name in self._names:
            return {self._names[processed.name]: processed.weights}
        return parsed["tensors"]

    def numbers(self, name: str, tensors: Iterable[Any]) -> Any:  # noqa: ANN401 - a torch tensor
        """Return a weight in float32.

        Args:
            name: The weight's name.
            tensors: Its tensors in the file.
        """
        made: dict[str, Any] = {}
        for tensor in tensors:
            made |= self.process(tensor.name, _dequantize(tensor), made)
        processed = made[name]
        float_tensor: Any = (
            processed
            if isinstance(processed, torch.Tensor)
            else torch.from_numpy(np.ascontiguousarray(processed))
        )
        return float_tensor.float().contiguous()


def find_weights(
    tensors: Iterable[Any],
    architecture: str,
    config: Mapping[str, Any],
    model: Any,  # noqa: ANN401
) -> list[Weight]:
    """Return a file's weights; tensors that no weight uses are ignored.

    Args:
        tensors: The file's tensors, from `gguf.GGUFReader`.
        architecture: Its name in the file.
        config: The file's settings that transformers reads.
        model: A model of its class on the meta device.
    """
    names = _Names(architecture, config, model)
    weights: list[Weight] = []
    others: dict[str, list[Any]] = defaultdict(list)
    for tensor in tensors:
        made = _moved_rows(names, tensor)
        if made is not None:
            name, order = made
            make = partial(names.numbers, name, (tensor,))
            weights.append(Weight(name, (tensor,), True, order, make))
            continue
        for name in names.process(tensor.name, _sample(tensor), {}):
            others[name].append(tensor)
    for name, sources in others.items():
        weights.append(
            Weight(name, tuple(sources), False, None, partial(names.numbers, name, sources))
        )
    return weights


def _dequantize(tensor: Any) -> Any:  # noqa: ANN401 - a numpy array
    """Return a tensor's values in float32."""
    if (block_format := FORMATS.get(tensor.tensor_type.name)) is not None:
        rows = torch.from_numpy(tensor.data.reshape(-1, tensor.data.shape[-1]).copy())
        numbers = dequantize_blocks(rows, block_format).numpy()
        return numbers.reshape(*tensor.data.shape[:-1], -1)
    import gguf  # noqa: PLC0415 - rarely needed

    return gguf.dequantize(tensor.data, tensor.tensor_type)


def _sample(tensor: Any) -> Any:  # noqa: ANN401
    """Return zeros of a tensor's shape, which take no memory."""
    return np.broadcast_to(np.float32(-1), tuple(int(size) for size in tensor.shape[::-1]))


def _moved_rows(names: _Names, tensor: Any) -> tuple[str, Any | None] | None:  # noqa: ANN401
    """Return a weight's name and the order of its rows; None if it does more than move rows."""
    shape = tuple(int(size) for size in tensor.shape[::-1])
    if len(shape) != MIN_DIMENSIONS:
        return None
    numbers = np.arange(shape[0], dtype=np.float64)
    marked = np.stack([numbers, numbers + 0.5], 1)
    try:
        made = names.process(tensor.name, marked, {})
    except ValueError:  # it needs the number of columns
        return None
    (name, rows), *others = made.items() if made else [("", None)]
    if others or not isinstance(rows, np.ndarray) or rows.shape != marked.shape:
        return None
    order = rows[:, 0]
    if not np.array_equal(rows[:, 1], order + 0.5) or not np.array_equal(np.sort(order), numbers):
        return None
    return name, None if np.array_equal(order, numbers) else order.astype(np.int32)
