"""Makes the tokens that a bit mask excludes impossible. The device gets one bit per token."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.host_copies import to_device

_TOKENS = 4096  # per program
_WORD_BITS = 32


@triton.jit(do_not_specialize=["words"])
def _mask_logits_kernel(  # noqa: PLR0917
    logits,
    rows,
    masks,
    row_stride,
    vocab_size,
    words,
    TOKENS: tl.constexpr,
    WORD_BITS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows + place) * row_stride
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real = token < vocab_size
    word = token // WORD_BITS
    bits = tl.load(masks + place * words + word, mask=real & (word < words), other=0)
    forbidden = ((bits >> (token % WORD_BITS)) & 1) == 0
    # Allowed tokens do not change, so nothing is read.
    impossible = tl.full((TOKENS,), -float("inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(row + token, impossible, mask=real & forbidden)


def mask_logits(logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Make tokens impossible, in place; see `octavo.kernels.logits.mask_logits`.

    Rows and masks cross the bus from pinned memory, which PyTorch keeps until the copy is done.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"rows of logits must be contiguous: strides are {logits.stride()}")
    device, vocab_size = logits.device, logits.shape[1]
    _mask_logits_kernel[(len(rows), triton.cdiv(vocab_size, _TOKENS))](
        logits,
        to_device(rows, device),
        to_device(masks, device),
        logits.stride(0),
        vocab_size,
        masks.shape[1],
        TOKENS=_TOKENS,
        WORD_BITS=_WORD_BITS,
    )
