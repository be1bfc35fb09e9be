"""The file of the sequence that does not fit in memory: written here, read by the CPU kernels.

A unit holds the same tokens of all layers. The file is ordered by layer, then by unit, so that a
step reads each layer from one end to the other, while the kernels compute what was read before.
Direct reads and writes keep the file's pages out of memory.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from octavo.engine.memory.cache_layout import CacheLayout
from octavo.kernels import cpu
from octavo.kernels.cpu.spill import SpillLayout
from octavo.kernels.whole_numbers import width_of

PART_TOKENS = 512
"""Tokens of which attention computes a part at a time (`kPart` in plan.h): units end with parts, so
that parts are merged as if all were in memory."""
PAGE = 4096
"""Alignment in bytes of direct reads and writes."""
RING_BYTES = 16 << 20
"""Memory for units that are read ahead."""
LEAST_RING_UNITS = 4
THREADS = 4
"""Reads of the file at a time."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SpillPlan:
    """The sizes of a file.

    Attributes:
        layout: The layout of the cache's blocks.
        dtype: The cache's data type.
        unit_tokens: Tokens of a unit.
        num_units: Units in the file.
    """

    layout: CacheLayout
    dtype: torch.dtype
    unit_tokens: int
    num_units: int

    @property
    def unit_blocks(self) -> int:
        """Blocks of a unit."""
        return self.unit_tokens // self.layout.groups[0].block_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer in a block."""
        return layer_elements(self.layout, self.dtype) * self.dtype.itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes of a layer in a unit."""
        return self.unit_blocks * self.layer_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.layout.places) * self.num_units * self.unit_bytes


def layer_elements(layout: CacheLayout, dtype: torch.dtype) -> int:
    """Return the elements of a layer's keys and values in a block of the only layer group."""
    (shape,), (group,) = layout.shapes, layout.groups
    widths = width_of(shape.key_dim, dtype) + width_of(shape.value_dim, dtype)
    return shape.num_kv_heads * widths * group.block_size


def unit_tokens(layout: CacheLayout, dtype: torch.dtype) -> int:
    """Return the tokens of a unit: the fewest whole parts whose layers are whole pages."""
    tokens = PART_TOKENS
    token_bytes = layer_elements(layout, dtype) * dtype.itemsize // layout.groups[0].block_size
    while tokens * token_bytes % PAGE:
        tokens *= 2
    return tokens


class SpillFile:
    """A file without a name, which ends with the process; its space is reserved when it is made.

    Attributes:
        plan: Its sizes.

    Args:
        directory: The directory whose file system holds it.
        plan: Its sizes.

    Raises:
        OSError: It cannot be made, or the file system has too little space.
    """

    def __init__(self, directory: Path, plan: SpillPlan) -> None:
        assert cpu.spill is not None, "the startup refuses it"
        self.plan = plan
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - kept open
        number = self.fileno()
        with suppress(OSError):  # some file systems only know reads through the page cache
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_DIRECT)
        os.posix_fallocate(number, 0, plan.file_bytes)
        self._failed = False
        place = plan.layout.places[0]
        elements = layer_elements(plan.layout, plan.dtype)
        self._reader = cpu.spill.open(
            SpillLayout(
                unit_bytes=plan.unit_bytes,
                num_units=plan.num_units,
                block_elements=elements,
                values_at=(place.values - place.keys) * plan.dtype.itemsize,
                file=number,
                num_layers=len(plan.layout.places),
                unit_blocks=plan.unit_blocks,
                ring_units=max(LEAST_RING_UNITS, RING_BYTES // plan.unit_bytes),
                threads=THREADS,
            )
        )
        memory = torch.empty(plan.unit_bytes + PAGE, dtype=torch.uint8)
        self._unit = memory[-memory.data_ptr() % PAGE :][: plan.unit_bytes]

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def write(self, cache: torch.Tensor, blocks: Sequence[int], unit: int) -> None:
        """Write some blocks of `cache`, `[num_blocks, block_elements]`, to a unit."""
        plan, bytes_of = self.plan, cache.view(torch.uint8)
        chosen, staged = torch.tensor(blocks), self._unit.view(plan.unit_blocks, plan.layer_bytes)
        for layer, place in enumerate(plan.layout.places):
            begin = place.keys * plan.dtype.itemsize
            columns = bytes_of[:, begin : begin + plan.layer_bytes]
            torch.index_select(columns, 0, chosen, out=staged)
            at = (layer * plan.num_units + unit) * plan.unit_bytes
            try:
                self._write_unit(at)
            except OSError as error:
                log.warning("--kv-spill: write failed", error=str(error))
                self._failed = True
                return

    def _write_unit(self, at: int) -> None:
        written = os.pwrite(self.fileno(), memoryview(self._unit.numpy().data), at)
        if written < len(self._unit):
            raise OSError(f"{written} of {len(self._unit)} bytes were written")

    @contextmanager
    def reading(self, index: int, units: int) -> Iterator[None]:
        """Read units for a step that attends to them in this context.

        Args:
            index: The sequence's index in the batch.
            units: Number of units that hold its first tokens.
        """
        self._reader.begin(index, units)
        try:
            yield
        finally:
            if self._reader.end():
                log.warning("--kv-spill: read failed")
                self._failed = True

    def take_failed(self) -> bool:
        """Return whether the file failed since the last call: its sequence's results are wrong."""
        failed, self._failed = self._failed, False
        return failed
