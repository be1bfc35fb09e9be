"""The linear layers that adapters may adapt; an adapter's matrices must fit them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.engine.models.linear.adapted_layers import Placement, Target
from octavo.kernels.low_rank import RECORD, LowRankLayer, LowRankPart


@dataclass(frozen=True, slots=True)
class Targets:
    """The linear layers that adapters of a model may adapt.

    Attributes:
        layers: The layers, by their names in transformers' model.
        dtype: Dtype of the layers' inputs and, after conversion, of adapters.
        pinned: Whether adapters are in pinned memory, for copies to a GPU.
        orders: Input orders, by their numbers in `Placement`.
        elsewhere: The layers of other ranks' stages.
        packed: The packed layers that contain these layers, by number.
    """

    layers: Mapping[str, Target]
    dtype: torch.dtype
    pinned: bool = False
    orders: Sequence[tuple[int, ...]] = ()
    elsewhere: Mapping[str, Target] = field(default_factory=dict)
    packed: tuple[LowRankLayer, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts: dict[int, list[LowRankPart]] = {}
        heads: set[int] = set()
        for target in self.layers.values():
            if (placement := target.placement) is not None:
                panels = placement.panels(target.outputs)
                part = LowRankPart(
                    target.index, placement.panel, panels, placement.lane, placement.lanes
                )
                parts.setdefault(placement.packed, []).append(part)
                heads |= {placement.packed} if target.is_head else set()
        packed = (
            LowRankLayer(tuple(parts.get(number, ())), number in heads)
            for number in range(max(parts, default=-1) + 1)
        )
        object.__setattr__(self, "packed", tuple(packed))

    def make_records(self) -> np.ndarray:
        """Return a record for each index, of an adapter that adapts no layer."""
        count = max((target.index for target in self.layers.values()), default=-1) + 1
        return np.zeros((count, RECORD), np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for `from_json`."""
        return {
            "layers": {name: asdict(target) for name, target in self.layers.items()},
            "dtype": str(self.dtype).removeprefix("torch."),
            "orders": list(map(list, self.orders)),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Targets":
        """Return targets from the JSON of `to_json`, for a CPU.

        Raises:
            ValueError: The JSON is not from `to_json`.
        """
        try:
            layers = {}
            for name, target in data["layers"].items():
                placed = target["placement"]
                placement = None if placed is None else Placement(**placed)
                layers[name] = Target(**(target | {"placement": placement}))
            orders = tuple(map(tuple, data["orders"]))
            return cls(layers, getattr(torch, data["dtype"]), orders=orders)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the layers that adapters may adapt are malformed: {error}"
            ) from error
