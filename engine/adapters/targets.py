"""What an adapter's matrices are held to: the linear layers of the model that it may adapt."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.low_rank import RECORD


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer that adapters may adapt.

    Attributes:
        index: Its place among the model's targets.
        inputs: Its inputs.
        outputs: Its outputs.
        is_head: Whether it makes the logits: then it runs for some of the tokens only.
    """

    index: int
    inputs: int
    outputs: int
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Targets:
    """The linear layers that adapters of a model may adapt.

    Attributes:
        layers: By their names in transformers' model.
        dtype: Of the layers' inputs, which adapters are converted to.
        pinned: Whether adapters lie in pinned memory, as a GPU copies them from it.
    """

    layers: Mapping[str, Target]
    dtype: torch.dtype
    pinned: bool = False

    def make_records(self) -> np.ndarray:
        """Return a record for each index, of an adapter that leaves all layers as they are."""
        count = max((target.index for target in self.layers.values()), default=-1) + 1
        return np.zeros((count, RECORD), np.int64)
