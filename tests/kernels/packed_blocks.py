"""Packs GGUF's blocks in PyTorch: the definition of the kernels' layout."""

import torch
from torch.nn.functional import pad

from octavo.kernels.cpu.blocks import read_fields


def pack(rows, own, panel):
    """Pack `[outputs, bytes]` to `[panels, units, bytes]` uint8, with `panel` outputs per panel."""
    rows = pad(rows, (0, 0, 0, -len(rows) % panel))
    panels = len(rows) // panel
    fields = read_fields(rows, own)
    blocks = fields.codes.shape[1]
    codes = fields.codes.reshape(panels, 2, panel // 2, blocks, 8, 4)
    lanes = words_of(codes, own.bits).permute(0, 3, 1, 4, 2, 5).flatten(2)
    small = [part for part in (fields.scales, fields.mins) if part is not None]
    parts = [of_panels(part, panels).transpose(2, 3).flatten(2) for part in small]
    units = torch.cat([*parts, lanes], -1).reshape(panels, fields.scale.shape[1], -1)
    halves = [part for part in (fields.scale, fields.least) if part is not None]
    outer = [
        of_panels(part.contiguous().view(torch.uint8).unflatten(1, (-1, 2)), panels)
        for part in halves
    ]
    return torch.cat([*(part.flatten(2) for part in outer), units], -1)


def of_panels(values, panels):
    """Reshape `[outputs, n, ...]` to `[panels, n, outputs of a panel, ...]`."""
    return values.unflatten(0, (panels, -1)).transpose(1, 2)


def words_of(codes, bits):
    """Pack `[..., 8, 4]` codes to `[..., bits, 4]` bytes, as blocks.h unpacks them."""
    if bits == 8:
        return codes
    first, last = codes[..., :4, :], codes[..., 4:, :]
    low, high = first & 15 | last << 4, codes >> 4
    if bits == 4:
        return low
    each = 8 if bits == 5 else 4  # share a byte
    shifts = torch.arange(each, dtype=torch.uint8)[:, None] * (bits - 4)
    spread = high.unflatten(-2, (-1, each)) << shifts
    return torch.cat([low, spread.sum(-2, dtype=torch.uint8)], -2)
