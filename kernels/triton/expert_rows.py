"""Rows of experts: sort them, find them in programs, and add them up.

Rows are sorted once. A product takes the rows of one expert. The results are added up row by row
without atomics, so that a token's result does not depend on their order.

Only the GPU knows the number of rows of each expert. So a grid has a program for every possible
tile, as in MegaBlocks (Gale et al. 2022); programs without an expert end at once.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM_COLUMNS = 512


def sort_pairs(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a row and an expert by their experts, without waiting for the GPU.

    Returns:
        `[pairs]` int64, the pairs in the order of their experts, then those whose expert does not
        exist; and `[num_experts + 1]` int32, the first pair of each expert.
    """
    flat = expert_ids.flatten()
    known = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, known + 1, torch.ones_like(known))
    return known.argsort(stable=True), counts[:-1].cumsum(0).to(torch.int32)


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of tiles; a tile has rows of one expert.

    Args:
        num_pairs: The pairs of a row and an expert.
        num_experts: The experts.
        rows: The rows of a tile.
    """
    return num_pairs // rows + min(num_experts, num_pairs)


def add_up(pairs: Tensor, expert_ids: Tensor, num_experts: int, out: Tensor) -> None:
    """Add up each row's experts.

    Args:
        pairs: `[rows * chosen, hidden]` float32, the weighted results of a row's experts.
        expert_ids: `[rows, chosen]` int64; pairs of experts that do not exist may be NaN.
        num_experts: The experts.
        out: `[rows, hidden]`.
    """
    num_rows, hidden = out.shape
    _sum_kernel[(num_rows, triton.cdiv(hidden, SUM_COLUMNS))](
        *(pairs, expert_ids, out, hidden, num_experts),
        CHOSEN=expert_ids.shape[1],
        COLUMNS=SUM_COLUMNS,
    )


@triton.jit
def find_rows(starts, tile, NUM_EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert, its first sorted row and the end of the expert's rows."""
    expert = tl.arange(0, PADDED)
    exists = expert < NUM_EXPERTS
    first = tl.load(starts + expert, mask=exists, other=0)
    after = tl.load(starts + expert + 1, mask=exists, other=0)
    tiles = (after - first + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    chosen = tl.sum((exists & (ends <= tile)).to(tl.int32), 0)
    is_chosen = expert == chosen
    begin = tl.sum(tl.where(is_chosen, first + (tile - ends + tiles) * ROWS, 0), 0)
    end = tl.sum(tl.where(is_chosen, after, 0), 0)
    return chosen, begin, end


@triton.jit
def activate(x, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """Apply an activation of octavo.kernels.activation."""
    if KIND == 0:
        return x * tl.sigmoid(ALPHA * x)
    if KIND == 1:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    positive = tl.maximum(x, 0.0)
    return positive if KIND == 3 else positive * positive


@triton.jit
def _sum_kernel(  # noqa: PLR0917
    pairs, expert_ids, out, hidden, num_experts, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up a row's weighted experts; pairs of experts that do not exist may be NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < hidden
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in range(CHOSEN):
        pair = row * CHOSEN + choice
        expert = tl.load(expert_ids + pair)
        if (expert >= 0) & (expert < num_experts):
            total += tl.load(pairs + pair * hidden + column, mask=real, other=0.0)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=real)
