"""A rank's shard of a weight."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's shard of a weight: the same range of each group along one dimension.

    Attributes:
        dim: The dimension, from the last: -1 for the inputs of a linear layer, -2 for its outputs.
        groups: Number of groups, such as 2 for gates and up projections in one weight.
        start: First index within a group.
        length: Number of indices within a group.
    """

    dim: int
    groups: int
    start: int
    length: int

    def take(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor, maybe as a view."""
        grouped = torch.unflatten(tensor, self.dim, (self.groups, -1))
        return grouped.narrow(self.dim, self.start, self.length).flatten(self.dim - 1, self.dim)
