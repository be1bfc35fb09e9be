"""Linear layers in fp8, with a scale per output of the weights and per row.

A kernel rounds the rows; PyTorch's `_scaled_mm` (cuBLAS or CUTLASS) multiplies.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.quantized import E4M3, FP8_MULTIPLE, LARGEST, MIN_SCALE

COLUMNS = 1024
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@triton.jit(do_not_specialize=["row_stride"])
def _round_rows_kernel(  # noqa: PLR0917
    x,
    out,
    scales,
    inputs,
    row_stride,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    greatest = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, inputs, COLUMNS):
        known = first + column < inputs
        values = tl.load(x + row * row_stride + first + column, mask=known, other=0.0)
        greatest = tl.maximum(greatest, tl.abs(values.to(tl.float32)))
    scale = tl.maximum(tl.max(greatest, 0) / LARGEST, MIN_SCALE)
    tl.store(scales + row, scale)
    for first in range(0, inputs, COLUMNS):
        known = first + column < inputs
        values = tl.load(x + row * row_stride + first + column, mask=known, other=0.0)
        rounded = tl.minimum(tl.maximum(values.to(tl.float32) / scale, -LARGEST), LARGEST)
        tl.store(out + row * inputs + first + column, rounded.to(out.dtype.element_ty), mask=known)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to e4m3.

    Args:
        x: `[rows, inputs]`.

    Returns:
        `[rows, inputs]` e4m3, and `[rows, 1]` float32 scales, the factors of each row's values.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        _round_rows_kernel[(len(x),)](
            *(x, out, scales, x.shape[1], x.stride(0)),
            LARGEST=LARGEST,
            MIN_SCALE=MIN_SCALE,
            COLUMNS=COLUMNS,
        )
    return out, scales


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by fp8 weights; see `octavo.kernels.ops.fp8_linear`."""
    if not len(x):
        return x.new_empty((0, len(weight)))
    rows, scales = round_rows(x)
    out = multiply(rows, weight, scales, scale, x.dtype)
    return out if bias is None else out + bias


def multiply(
    rows: Tensor, weight: Tensor, scales: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply rows in e4m3 by weights in e4m3.

    Args:
        rows: `[rows, inputs]` e4m3.
        weight: `[outputs, inputs]` e4m3.
        scales: `[rows, 1]` float32, of the rows.
        scale: `[1, outputs]` float32, of the weights.
        dtype: Dtype of the result.

    Returns:
        `[rows, outputs]`.
    """
    out: Tensor = torch._scaled_mm(  # noqa: SLF001 - PyTorch has no other name for it yet
        rows, weight.t(), scale_a=scales, scale_b=scale, out_dtype=dtype
    )
    return out


@cache
def has_fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a GPU multiplies rows and weights in e4m3 with these scales.

    Before 2.12, PyTorch launches these products on compute capability 8.9 in the default stream,
    whatever the current one is (pytorch#177651): then CUDA graphs and swaps would not order them.

    Args:
        device: The GPU.
        dtype: Dtype of rows before they are rounded, and of outputs.
    """
    gpu = describe_gpu(device)
    if gpu.e4m3 != E4M3 or (gpu.capability == (8, 9) and TORCH < (2, 12)):
        return False
    ones = torch.ones((FP8_MULTIPLE, FP8_MULTIPLE), device=device)
    try:
        product = multiply(ones.to(E4M3), ones.to(E4M3), 2 * ones[:, :1], 3 * ones[:1], dtype)
    except (RuntimeError, ValueError, NotImplementedError):  # PyTorch versions differ
        return False
    return bool((product == 6 * FP8_MULTIPLE).all())
