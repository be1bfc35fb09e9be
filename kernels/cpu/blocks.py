"""Linear layers and embeddings whose weights stay in GGUF's block formats.

A block holds 32 weights of one output, which share a scale. The "K" formats group eight blocks into
a unit, which has another scale. The kernels read the same bits in another order; they store each
6-bit scale of Q4_K and Q5_K in a byte.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import huge_pages

BLOCK = 32
"""Inputs of a block."""
_UNIT_BLOCKS = 8  # blocks of a K format's unit


class BlockFormat(NamedTuple):
    """A block format of GGUF.

    Attributes:
        name: Name in GGUF.
        number: Number in blocks.h.
        bits: Bits of a code.
        is_super: Whether it is a K format.
        has_min: Whether a weight is `code * scale + minimum`, not `(code - middle) * scale`.
        unit_bytes: Bytes of a unit in the file.
    """

    name: str
    number: int
    bits: int
    is_super: bool
    has_min: bool
    unit_bytes: int

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return BLOCK * _UNIT_BLOCKS if self.is_super else BLOCK

    @property
    def packed_bytes(self) -> int:
        """Bytes of a unit in the kernels' layout, where each 6-bit value takes a byte."""
        return self.unit_bytes + (4 if self.is_super and self.has_min else 0)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return BLOCK // 2 if self.bits == 6 else BLOCK


FORMATS = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("Q4_0", 0, 4, is_super=False, has_min=False, unit_bytes=18),
        BlockFormat("Q4_1", 1, 4, is_super=False, has_min=True, unit_bytes=20),
        BlockFormat("Q5_0", 2, 5, is_super=False, has_min=False, unit_bytes=22),
        BlockFormat("Q5_1", 3, 5, is_super=False, has_min=True, unit_bytes=24),
        BlockFormat("Q8_0", 4, 8, is_super=False, has_min=False, unit_bytes=34),
        BlockFormat("Q4_K", 5, 4, is_super=True, has_min=True, unit_bytes=144),
        BlockFormat("Q5_K", 6, 5, is_super=True, has_min=True, unit_bytes=176),
        BlockFormat("Q6_K", 7, 6, is_super=True, has_min=False, unit_bytes=210),
    )
}
"""The formats that kernels support, by name."""


class BlockFields(NamedTuple):
    """The fields of packed weights.

    Attributes:
        codes: `[outputs, blocks, 32]` uint8; signed (int8) in Q8_0.
        scale: `[outputs, units]` float16.
        least: `[outputs, units]` float16; None if the format has no minimum.
        scales: `[outputs, blocks, groups of a block]` uint8, int8 in Q6_K; None if the format has
            none.
        mins: `[outputs, blocks, 1]` uint8; None if the format has none.
    """

    codes: Tensor
    scale: Tensor
    least: Tensor | None
    scales: Tensor | None
    mins: Tensor | None


def read_fields(rows: Tensor, block_format: BlockFormat) -> BlockFields:
    """Split a weight's bytes into fields; ggml's ggml-common.h defines the layouts.

    Args:
        rows: `[outputs, bytes]` uint8, whole units, as in the file.
        block_format: Their format.
    """
    units = rows.reshape(len(rows), -1, block_format.unit_bytes)
    if block_format.bits == 6:
        return _read_q6_k(units)
    scale, rest = _half(units[..., :2]), units[..., 2:]
    least = None
    if block_format.has_min:
        least, rest = _half(rest[..., :2]), rest[..., 2:]
    scales = mins = None
    if block_format.is_super:
        scales, mins = _read_small(rest[..., :12])
        rest = rest[..., 12:]
    if block_format.bits == 8:
        return BlockFields(rest, scale, None, None, None)
    high_bytes = (block_format.bits - 4) * block_format.unit // 8
    high, low = rest[..., :high_bytes], rest[..., high_bytes:]
    # Two blocks, or the halves of one block, share bytes.
    low = _apart(low, -1, -1, BLOCK if block_format.is_super else BLOCK // 2)
    codes = torch.stack([low & 15, low >> 4], -2).reshape(len(rows), -1, BLOCK)
    if high_bytes:
        eight = torch.arange(8, dtype=torch.uint8)
        if block_format.is_super:  # bit b of a byte belongs to block b
            bits = (high.unsqueeze(-2) >> eight[:, None]) & 1
        else:
            bits = (high.unsqueeze(-1) >> eight) & 1
        codes = codes | bits.reshape(codes.shape) << 4
    return BlockFields(codes, scale, least, scales, mins)


def _read_q6_k(units: Tensor) -> BlockFields:
    low, high = _apart(units[..., :128], -1, 2, 2, 32), units[..., 128:192]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    crumbs = (_apart(high, -1, 2, 1, 32) >> shifts) & 3
    codes = torch.cat([low & 15, low >> 4], -2) | crumbs << 4
    scales = units[..., 192:208].reshape(len(units), -1, 2)
    codes = codes.reshape(len(units), -1, BLOCK)
    return BlockFields(codes, _half(units[..., 208:210]), None, scales, None)


def _read_small(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack eight 6-bit scales and eight 6-bit minima from 12 bytes."""
    first, second, third = _apart(packed, -1, 3, 4).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales.flatten(1).unsqueeze(-1), mins.flatten(1).unsqueeze(-1)


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).squeeze(-1)


def to_q4_1(codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Pack weights in the format Q4_1; a weight is `code * scale + least`.

    Args:
        codes: `[outputs, blocks, 32]`, from 0 to 15.
        scale: `[outputs, blocks]`, rounded to float16.
        least: `[outputs, blocks]`, rounded to float16.

    Returns:
        `[outputs, bytes]` uint8, as in a file.
    """
    low, high = codes.to(torch.uint8).chunk(2, -1)
    halves = torch.stack([scale, least], -1).to(torch.float16).contiguous()
    return torch.cat([halves.view(torch.uint8), low | high << 4], -1).flatten(1)


def dequantize(
    rows: Tensor,
    block_format: BlockFormat,
    dtype: torch.dtype = torch.float32,
    order: Tensor | None = None,
) -> Tensor:
    """Dequantize packed weights; the kernels return the same bits.

    Args:
        rows: `[rows, bytes]` uint8, as in the file.
        block_format: Their format.
        dtype: Dtype of the weights: float32 or bfloat16.
        order: `[outputs]` int64, the row of each output; None if they are in order.

    Returns:
        `[outputs, inputs]`.
    """
    fields = read_fields(rows if order is None else rows[order], block_format)
    blocks = _UNIT_BLOCKS if block_format.is_super else 1
    codes = fields.codes.view(torch.int8) if block_format.bits == 8 else fields.codes
    scale = fields.scale.float().repeat_interleave(blocks, 1)[..., None]
    if fields.scales is not None:
        small = fields.scales.view(torch.int8) if block_format.bits == 6 else fields.scales
        scale = scale * small.float()
    wide = codes.float()
    if not block_format.has_min and block_format.bits < 8:
        wide -= 1 << (block_format.bits - 1)
    wide = _apart(wide, -1, -1, block_format.group) * scale[..., None]
    if fields.least is not None:
        least = fields.least.float().repeat_interleave(blocks, 1)[..., None, None]
        wide = wide + least if fields.mins is None else wide - least * fields.mins[..., None]
    return wide.reshape(len(codes), -1).to(dtype)


class BlockKernels:
    """Packs and dequantizes weights, with the operators of stored_blocks.cpp.

    Args:
        operators: The operators, `torch.ops.octavo_cpu`.
        panel: Outputs of a panel.
    """

    def __init__(self, operators: Any, panel: int) -> None:  # noqa: ANN401 - any namespace
        self._operators, self._panel = operators, panel

    def dequantize(
        self,
        rows: Tensor,
        block_format: BlockFormat,
        dtype: torch.dtype = torch.float32,
        order: Tensor | None = None,
    ) -> Tensor:
        """Dequantize packed weights; see `dequantize`.

        Raises:
            IndexError: There is no such row.
        """
        rows = rows.contiguous()
        addresses, row_bytes = row_addresses(rows, order), rows.shape[1]
        inputs = row_bytes // block_format.unit_bytes * block_format.unit
        out = torch.empty((len(addresses), inputs), dtype=dtype)
        huge_pages.ask_for(out)
        self._operators.widen_blocks(out, addresses, row_bytes, block_format.number)
        return out

    def pack(self, rows: Tensor, block_format: BlockFormat, order: Tensor | None = None) -> Tensor:
        """Lay out a weight's bytes for the kernels.

        Args:
            rows: `[rows, bytes]` uint8, as in the file.
            block_format: Their format.
            order: `[outputs]` int64, the row of each output; None if they are in order.

        Returns:
            `[panels, units, bytes]` uint8.

        Raises:
            IndexError: There is no such row.
        """
        rows = rows.contiguous()
        return self.pack_rows(row_addresses(rows, order), rows.shape[1], block_format)

    def pack_rows(self, addresses: Tensor, row_bytes: int, block_format: BlockFormat) -> Tensor:
        """Lay out a weight's bytes, which may lie in several places, for the kernels.

        Args:
            addresses: `[outputs]` int64, the address of each output's row; 0 for zeros.
            row_bytes: The number of bytes of a row.
            block_format: Format of the rows.

        Returns:
            `[panels, units, bytes]` uint8.
        """
        units, outputs = row_bytes // block_format.unit_bytes, len(addresses)
        shape = -(-outputs // self._panel), units, self._panel * block_format.packed_bytes
        out = torch.empty(shape, dtype=torch.uint8)
        huge_pages.ask_for(out)
        self._operators.pack_blocks(out, addresses, row_bytes, block_format.number)
        return out


def _apart(values: Tensor, dim: int, *sizes: int) -> Tensor:
    """Split a dimension of a tensor into dimensions of these sizes."""
    taken: Tensor = values.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return taken


def row_addresses(rows: Tensor, order: Tensor | None) -> Tensor:
    """Return the addresses of outputs' rows, `[outputs]` int64.

    Args:
        rows: `[rows, bytes]` uint8, contiguous.
        order: `[outputs]` int64, the row of each output; None if they are in order.

    Raises:
        IndexError: There is no such row.
    """
    first, row_bytes = rows.data_ptr(), rows.shape[1]
    if order is None:
        return torch.arange(len(rows)).mul_(row_bytes).add_(first)
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(rows):
        raise IndexError(f"an output is in none of {len(rows)} rows")
    return order * row_bytes + first
