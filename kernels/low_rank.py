"""Low-rank products for the rows of a batch, as in LoRA adapters (Hu et al. 2021).

Rows of different adapters share a batch. They are sorted by adapter and cut into small tiles of one
adapter, so that a kernel reads an adapter's matrices once per tile (Punica, Chen et al. 2023;
S-LoRA, Sheng et al. 2023).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.host_copies import to_device

TILE_ROWS = 16
"""Maximum rows of a tile: the minimum of a GPU's matrix instructions."""
RECORD = 4
"""Length of a record; see `make_record`."""


@dataclass(frozen=True, slots=True)
class LowRankBatch:
    """The rows of a batch that have an adapter.

    Attributes:
        rows: `[n]` int32: the rows with an adapter, sorted by adapter.
        tiles: `[tiles, 3]` int32: an adapter's number, and the begin and end of the tile in `rows`.
        records: `[layers, adapters, RECORD]` int64: `make_record` for each layer and adapter.
        num_rows: Rows of the whole batch.
        max_rank: The highest rank of an adapter.
        owners: The tensors that hold the matrices in memory.
        adapters: `[num_rows]` int32: each row's adapter; -1 for none.
    """

    rows: Tensor
    tiles: Tensor
    records: Tensor
    num_rows: int
    max_rank: int
    owners: Sequence[Tensor]
    adapters: np.ndarray

    @classmethod
    def with_room(cls, num_rows: int, records: Tensor, max_rank: int) -> "LowRankBatch":
        """Return a batch with room for any rows and tiles, for CUDA graphs; see `take`.

        Args:
            num_rows: Rows of the whole batch.
            records: Records with room; the last adapter's stay zero, so that it adapts no layer.
            max_rank: The highest rank that an adapter may have.
        """
        most, device = records.shape[1] - 1, records.device
        # Each adapter may have one tile that is not full.
        partial = min(most, num_rows)
        tiles = torch.zeros(
            (partial + (num_rows - partial) // TILE_ROWS, 3), dtype=torch.int32, device=device
        )
        tiles[:, 0] = most
        rows = torch.zeros(num_rows, dtype=torch.int32, device=device)
        no_adapter = np.full(num_rows, -1, np.int32)
        return cls(rows, tiles, records, num_rows, max_rank, (), no_adapter)

    def take(self, batch: "LowRankBatch") -> None:
        """Replace rows and tiles by a batch's; the remaining tiles are the last adapter's."""
        rows, tiles = len(batch.rows), len(batch.tiles)
        self.rows[:rows] = batch.rows
        self.tiles[:tiles] = batch.tiles
        self.tiles[tiles:, 0] = self.records.shape[1] - 1
        self.tiles[tiles:, 1:] = 0


class LowRankPart(NamedTuple):
    """The part of a packed layer's outputs that belongs to one layer of the model.

    Records hold the second matrix in panels, `[panels, rank, lanes]`.

    Attributes:
        layer: Index of the layer in a batch's records.
        panel: The first panel of the packed layer with these outputs.
        panels: Number of panels with these outputs.
        lane: The first lane of each panel with these outputs.
        lanes: Number of such lanes in each panel.
    """

    layer: int
    panel: int
    panels: int
    lane: int
    lanes: int


class LowRankLayer(NamedTuple):
    """A packed layer that adapters adapt.

    Attributes:
        parts: The model's layers that it contains.
        of_logits: Whether it runs only for the rows of logits.
    """

    parts: tuple[LowRankPart, ...]
    of_logits: bool


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step.

    Attributes:
        tokens: The batch of layers that run for every token.
        logits: The batch of the head, which runs for the rows of logits.
        layers: The packed layers that adapters adapt.
    """

    tokens: LowRankBatch
    logits: LowRankBatch
    layers: Sequence[LowRankLayer] = ()

    @classmethod
    def with_room(
        cls, num_rows: int, num_logits: int, records: Tensor, max_rank: int
    ) -> "StepAdapters":
        """Return adapters with room for those of any step that `holds`, for CUDA graphs.

        Args:
            num_rows: Rows of the step.
            num_logits: Rows of logits.
            records: See `LowRankBatch.with_room`.
            max_rank: See `LowRankBatch.with_room`.
        """
        tokens, logits = (
            LowRankBatch.with_room(count, records, max_rank) for count in (num_rows, num_logits)
        )
        return cls(tokens, logits)

    def holds(self, step: "StepAdapters") -> bool:
        """Return whether there is room for a step's adapters; its rows must fit."""
        room, needed = self.tokens, step.tokens
        most = room.records.shape[1] - 1
        return needed.records.shape[1] <= most and needed.max_rank <= room.max_rank

    def take(self, step: "StepAdapters") -> None:
        """Replace the adapters by a step's."""
        records = step.tokens.records
        self.tokens.records[:, : records.shape[1]] = records
        self.tokens.take(step.tokens)
        self.logits.take(step.logits)

    def batch(self, *, of_logits: bool) -> LowRankBatch:
        """Return the batch of a layer."""
        return self.logits if of_logits else self.tokens


def make_record(down: int, up: int, rank: int, scale: float) -> np.ndarray:
    """Return the record of an adapter's layer that a kernel reads, `[RECORD]` int64.

    Args:
        down: Address of the matrix `[rank, inputs]`.
        up: Address of the matrix `[rank, outputs]`, or in panels; see `LowRankPart`.
        rank: The adapter's rank; 0 if it does not adapt the layer.
        scale: Factor of the product; its bits as a float64 are stored.
    """
    return np.array([down, up, rank, np.float64(scale).view(np.int64)], np.int64)


def sort_rows(
    adapters: np.ndarray, records: Tensor, max_rank: int, owners: Sequence[Tensor]
) -> LowRankBatch:
    """Sort the rows of a batch by adapter.

    Args:
        adapters: `[num_rows]`: each row's adapter; -1 for none.
        records: See `LowRankBatch`.
        max_rank: See `LowRankBatch`.
        owners: See `LowRankBatch`.
    """
    rows = np.argsort(adapters, kind="stable").astype(np.int32)
    rows = rows[np.searchsorted(adapters[rows], 0) :]
    tiles = _tiles(adapters[rows])
    device = records.device
    return LowRankBatch(
        to_device(rows, device),
        to_device(np.array(tiles, np.int32).reshape(-1, 3), device),
        records,
        len(adapters),
        max_rank,
        owners,
        adapters.astype(np.int32),
    )


def _tiles(adapters: np.ndarray) -> Sequence[tuple[int, int, int]]:
    """Return the tiles of sorted rows."""
    starts = [0, *(np.flatnonzero(np.diff(adapters)) + 1).tolist(), len(adapters)]
    return [
        (int(adapters[first]), begin, min(begin + TILE_ROWS, end))
        for first, end in itertools.pairwise(starts)
        for begin in range(first, end, TILE_ROWS)
    ]


def add_low_rank(out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
    """Add products in plain PyTorch; see `octavo.kernels.ops.add_low_rank`."""
    records = batch.records[layer].tolist()
    for adapter, begin, end in batch.tiles.tolist():
        down, up, rank, bits = records[adapter]
        if not rank:
            continue
        rows = batch.rows[begin:end].long()
        inner = x[rows].float() @ matrix_at(down, (rank, x.shape[1]), x.dtype).float().t()
        product = inner @ matrix_at(up, (rank, out.shape[1]), x.dtype).float()
        out[rows] = (out[rows].float() + np.int64(bits).view(np.float64) * product).to(out.dtype)


def matrix_at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a view of the matrix at a memory address."""
    from ctypes import c_char  # noqa: PLC0415 - for kernels in plain PyTorch only

    count = shape[0] * shape[1]
    memory = (c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
