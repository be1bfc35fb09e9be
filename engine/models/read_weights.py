"""Reads a model's weights, quantized in any format or not, by the names of their tensors."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from octavo.common.models.checkpoint import GENERATION_CONFIG, is_packed
from octavo.common.models.errors import ModelError, UnsupportedModelError
from octavo.common.models.gguf.tensor_locations import TensorLocations
from octavo.common.models.quantized import KEYS
from octavo.engine.models.deferred import SMALL, DeferredTensor
from octavo.engine.models.mapped_tensors import StoredTensor, open_tensors
from octavo.engine.models.model_classes import auto_class, without_vision
from octavo.engine.models.quantization.formats import find_format
from octavo.engine.models.quantization.formats.base import (
    Format,
    Rows,
    StoredWeight,
    TensorHeader,
    WeightError,
)

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes of weights that may be large, by safetensors' names."""

JOINED = 4
"""Maximum number of weights joined into one, such as queries, keys and values."""


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A deferred weight of a file, in transformers' form.

    Attributes:
        shape: Its shape.
        dtype: Its dtype: float32 of a quantized weight.
        read: Returns the weight.
        rows: Returns some of its rows, if possible; see `DeferredTensor`.
        stored: Returns a quantized weight as stored; None of others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    rows: Callable[[int, int], Tensor] | None = None
    stored: Callable[[], StoredWeight] | None = None

    def __getitem__(self, _: EllipsisType) -> Tensor:
        """Return the weight."""
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        exact = None if self.stored is None else self.read
        return DeferredTensor(like, self.read, stored=self.stored, exact=exact, rows=self.rows)


class QuantizedCheckpoint:
    """The weights of a model's directory, some of them quantized.

    Args:
        directory: The directory.
        stored_format: The format of its quantized weights.

    Raises:
        ModelError: A quantized weight lacks tensors or they have wrong types or shapes, or there
            are quantized weights of another format.

    Attributes:
        format: The format of the quantized weights.
        shapes: Each quantized weight's shape, by its name in transformers.
    """

    def __init__(self, directory: Path, stored_format: Format) -> None:
        self.format = stored_format
        self._directory = directory
        self._latest: list[StoredTensor] = []
        self._tensors = open_tensors(directory)
        headers = {name: tensor.header for name, tensor in self._tensors.items()}
        self._parts = self._find_parts(headers)
        self.shapes = {
            layer + stored_format.weight_ending: self._check(layer, parts, headers)
            for layer, parts in self._parts.items()
        }
        held = {name for parts in self._parts.values() for name in parts.values()}
        self._plain = {name: header for name, header in headers.items() if name not in held}
        self._check_plain()

    def weights(self) -> dict[str, Any]:
        """Return all weights by their names in transformers, deferred until needed."""
        plain = {name: self._tensors[name] for name in self._plain}
        return _lazy(plain) | {
            name: LazyWeight(
                *(shape, torch.float32, partial(self._dequantize, name)),
                partial(self._dequantize_rows, name) if self.format.has_rows else None,
                partial(self.read, name),
            )
            for name, shape in self.shapes.items()
        }

    def empty_weights(self) -> dict[str, Tensor]:
        """Return the weights on the meta device, for their shapes."""
        shapes = self.shapes | {name: header.shape for name, header in self._plain.items()}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def read(self, name: str) -> StoredWeight:
        """Return a quantized weight.

        Args:
            name: Its name in transformers, one of `shapes`.

        Raises:
            ModelError: Its values cannot be right.
        """
        layer = name.removesuffix(self.format.weight_ending)
        self._latest += [self._tensors[name] for name in self._parts[layer].values()]
        tensors = {part: self._tensors[tensor][...] for part, tensor in self._parts[layer].items()}
        try:
            return self.format.read(layer, tensors)
        except WeightError as error:
            raise ModelError(f"{self._directory}: {error}") from None

    def give_back(self) -> None:
        """Return to the system the memory of the files' parts read since the last call."""
        for tensor in self._latest:
            tensor.give_back()
        self._latest.clear()

    def _dequantize(self, name: str) -> Tensor:
        made = self.read(name).dequantize()
        self.give_back()
        return made

    def _dequantize_rows(self, name: str, start: int, end: int) -> Tensor:
        stored = self.read(name)
        assert isinstance(stored, Rows)
        made = stored.part(start, end).dequantize()
        if end == self.shapes[name][0]:
            self.give_back()
        return made

    def _find_parts(self, headers: Mapping[str, TensorHeader]) -> dict[str, dict[str, str]]:
        """Return the names of each quantized layer's tensors by part."""
        parts_by_layer: dict[str, dict[str, str]] = defaultdict(dict)
        for name in headers:
            for layer, part in self._split(name):
                parts_by_layer[layer][part] = name
        return {
            layer: parts
            for layer, parts in parts_by_layer.items()
            if self.format.is_quantized({part: headers[name] for part, name in parts.items()})
        }

    def _split(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the layer and part of a tensor, if its name has the suffix of a weight's part."""
        for ending, part in self.format.endings.items():
            if name.endswith(ending):
                yield name.removesuffix(ending), part

    def _check(
        self, layer: str, parts: Mapping[str, str], headers: Mapping[str, TensorHeader]
    ) -> tuple[int, ...]:
        part_headers = {part: headers[name] for part, name in parts.items()}
        try:
            return self.format.check(layer, part_headers)
        except WeightError as error:
            raise ModelError(f"{self._directory}: {error}") from None

    def _check_plain(self) -> None:
        """Refuse quantized weights that are not in the format."""
        if not self.shapes:
            raise UnsupportedModelError(
                f"{self._directory} contradicts itself: it says that its weights are quantized"
                f" ({self.format.description}), but none has the tensors of that format"
            )
        for name, header in self._plain.items():
            if is_packed(name, header.dtype):
                raise UnsupportedModelError(
                    f"{self._directory} has {name} of type {header.dtype}, which is not a weight of"
                    f" its format ({self.format.description})"
                )


def find_stored(weight: Tensor) -> StoredWeight | None:
    """Return the stored form of a model's weight; None if it is not quantized.

    Raises:
        ModelError: Its values cannot be right.
    """
    read = weight.stored if isinstance(weight, DeferredTensor) else None
    return None if read is None else read()


def open_checkpoint(path: str) -> QuantizedCheckpoint | None:
    """Return a model's quantized checkpoint; None if its weights are not quantized.

    Args:
        path: A directory with weights. For a hub name the result is None.

    Raises:
        UnsupportedModelError: Octavo does not support its format or its settings.
        ModelError: Its weights are incomplete.
        OSError: A file cannot be read.
    """
    directory = Path(path)
    if not directory.is_dir() or (stored_format := find_format(directory)) is None:
        return None
    return QuantizedCheckpoint(directory, stored_format)


def read_config(path: str, *, quantized: bool, text_alone: bool = False) -> PreTrainedConfig:
    """Return a model's config.

    Args:
        path: A directory or a hub name.
        quantized: Whether Octavo reads the weights. Then the config must not state that they are
            quantized, or transformers would create layers for that.
        text_alone: Whether to leave a vision part out, if transformers has a class for that.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if text_alone:
        config = without_vision(config)
    if quantized:
        for part in {id(each): each for each in (config, config.get_text_config())}.values():
            for key in KEYS:
                if hasattr(part, key):
                    delattr(part, key)
    return config


def load_weights(
    path: str,
    config: PreTrainedConfig,
    checkpoint: QuantizedCheckpoint | None,
    *,
    empty: bool = False,
    deferred: bool = False,
    **options: Any,  # noqa: ANN401 - as in transformers
) -> Any:  # noqa: ANN401
    """Load a model with transformers, without pickles and without code of the model.

    Quantized weights are deferred; see `deferred.py`.

    Args:
        path: A directory or a hub name.
        config: Its config, from `read_config`.
        checkpoint: Its checkpoint if its weights are quantized: they are dequantized.
        empty: Whether only the shapes of weights are needed.
        deferred: Whether other large weights are deferred, too.
        **options: For transformers' `from_pretrained`, whose result this returns.

    Raises:
        OSError: A file cannot be read.
        Exception: Transformers raises it.
    """
    deferred = deferred or bool(TensorLocations.read(Path(path)).tensors)
    if checkpoint is None and not (empty or deferred):
        return auto_class(config).from_pretrained(
            path, config=config, use_safetensors=True, trust_remote_code=False, **options
        )
    # To find the class, which accepts weights without a path.
    with torch.device("meta"), no_init_weights():
        made: Any = auto_class(config).from_config(config, trust_remote_code=False)
    if (Path(path) / GENERATION_CONFIG).is_file():
        options["generation_config"] = GenerationConfig.from_pretrained(path)
    if checkpoint is not None:
        weights = checkpoint.empty_weights() if empty else checkpoint.weights()
    else:
        weights = _plain_weights(Path(path), empty=empty)
    return type(made).from_pretrained(None, config=made.config, state_dict=weights, **options)


def _plain_weights(directory: Path, *, empty: bool) -> dict[str, Any]:
    """Return the weights of an unquantized model by name.

    Args:
        directory: The model's directory.
        empty: Whether only their shapes are needed.
    """
    tensors = open_tensors(directory).items()
    if empty:
        return {name: torch.empty(tensor.header.shape, device="meta") for name, tensor in tensors}
    return _lazy(dict(tensors))


def _lazy(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return files' tensors by name; large ones are deferred.

    The memory of each is released once some others have been read, as a few may be joined.
    """
    latest: deque[StoredTensor] = deque()

    def read(tensor: StoredTensor) -> Tensor:
        latest.append(tensor)
        if len(latest) > JOINED:
            latest.popleft().give_back()
        return tensor[...]

    def rows(tensor: StoredTensor, start: int, end: int) -> Tensor:
        whole = read(tensor) if end == tensor.place.shape[0] else tensor[...]
        return whole[start:end]

    weights: dict[str, Any] = {}
    for name, tensor in tensors.items():
        dtype, shape = TYPES.get(tensor.place.dtype), tensor.place.shape
        if dtype is None or math.prod(shape) < SMALL:
            weights[name] = tensor
        else:
            weights[name] = LazyWeight(
                shape, dtype, partial(read, tensor), rows=partial(rows, tensor)
            )
    return weights
