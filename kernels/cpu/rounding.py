"""Rounding of weights in C++, with the bits of `octavo.engine.models.quantization.rounding`."""

from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.kernels import huge_pages
from octavo.kernels.cpu.blocks import FORMATS
from octavo.kernels.cpu.linear import GROUP


class RoundingKernels:
    """The kernels of round_weights.cpp.

    Args:
        library: The compiled kernels.
    """

    def __init__(self, library: CDLL) -> None:
        weight = c_void_p, c_int64, c_int64, c_int64, c_int64
        self._to_q4_1 = library.octavo_round_to_q4_1
        self._to_q4_1.argtypes, self._to_q4_1.restype = (*weight, c_void_p, c_int), None

    def to_q4_1(self, weight: Tensor) -> Tensor:
        """Round a weight to 4 bits; each group gets the scale of the least squared error.

        Args:
            weight: `[outputs, inputs]` bfloat16 or float32, whole groups.

        Returns:
            `[outputs, bytes]` uint8, in GGUF's format Q4_1.
        """
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        outputs, groups = weight.shape[0], weight.shape[1] // GROUP
        out = torch.empty((outputs, groups * FORMATS["Q4_1"].unit_bytes), dtype=torch.uint8)
        huge_pages.ask_for(out)
        wide = int(weight.dtype == torch.float32)
        self._to_q4_1(
            *(weight.data_ptr(), weight.stride(0), wide, outputs, groups),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out
