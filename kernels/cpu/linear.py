"""Linear layers in C++: weights packed once, products straight from them.

oneDNN's products reach the arithmetic's limit with hundreds of rows. With the rows of
a decode step they do not come near memory's, and every call costs its bookkeeping. All
products of a step of SmolLM2-135M, on 2 cores of an EPYC 9004 (469 bfloat16 Gflop/s
and some 45 GB/s at most), in ms:

    rows                  1      8     48    512
    bfloat16, oneDNN   14.6   14.3   44.2    340
    bfloat16, these     9.1    8.2   33.8    332
    8 bits, oneDNN     10.3   11.1   27.2    199  without rounding activations
    8 bits, these       5.0    5.4   20.6    192  with it

"""

from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # outputs; as in linear.h
_PAIR, _FOUR = 2, 4  # inputs that one instruction takes: of 16 bits, of 8


class LinearKernels:
    """The kernels of linear.cpp.

    Args:
        library: the compiled kernels.

    Attributes:
        supported: whether they are for this CPU; if not, nothing else works.
    """

    def __init__(self, library: CDLL) -> None:
        self.supported = bool(library.octavo_has_linear())
        if not self.supported:
            return
        rows = (c_void_p, c_int64, c_int64)
        self._linear = library.octavo_linear
        self._linear.argtypes = (*rows, *2 * (c_void_p,), c_int64, c_int64, c_void_p, c_int)
        self._linear.restype = None
        self._int8 = library.octavo_linear_int8
        self._int8.argtypes = (*rows, *5 * (c_void_p,), c_int64, c_int64, c_void_p, c_int)
        self._int8.restype = None

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        """Lays weights out in panels.

        Args:
            weight: `[outputs, inputs]`, bfloat16 or int8; inputs a multiple of what
                `takes` says.

        Returns:
            `[panels, words, PANEL * elements of a word]`, of the same dtype.
        """
        word = _PAIR if weight.dtype == torch.bfloat16 else _FOUR
        whole = pad_outputs(weight)
        panels = whole.reshape(-1, PANEL, weight.shape[1] // word, word)
        return panels.transpose(1, 2).flatten(2).contiguous()

    @staticmethod
    def takes(inputs: int, dtype: torch.dtype) -> bool:
        """Says whether layers of so many inputs and of this dtype of weights can be packed."""
        return dtype in {torch.bfloat16, torch.int8} and inputs % _FOUR == 0

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor, outputs: int) -> Tensor:
        """Multiplies by bfloat16 weights.

        Args:
            x: `[rows, inputs]` bfloat16.
            panels: the packed weights.
            bias: `[outputs, padded to whole panels]` float32.
            outputs: how many there are.

        Returns:
            `[rows, outputs]` bfloat16, rounded once.
        """
        x, out = _prepare(x, outputs)
        self._linear(
            *(x.data_ptr(), x.shape[0], x.stride(0), panels.data_ptr(), bias.data_ptr()),
            *(x.shape[1], outputs, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def linear_int8(  # noqa: PLR0917 - as the operator
        self,
        x: Tensor,
        panels: Tensor,
        factors: Tensor,
        scales: Tensor,
        row_sums: Tensor,
        bias: Tensor,
        outputs: int,
    ) -> Tensor:
        """Multiplies by 8-bit weights, activations rounded to 8 bits row by row.

        Args:
            x: `[rows, inputs]` bfloat16.
            panels: the packed weights.
            factors: `[inputs]` float32, by which x is multiplied before it is rounded.
            scales: `[padded outputs]` float32, by which weights are.
            row_sums: `[padded outputs]` float32, sums of an output's scaled weights.
            bias: `[padded outputs]` float32.
            outputs: how many there are.

        Returns:
            `[rows, outputs]` bfloat16.
        """
        x, out = _prepare(x, outputs)
        self._int8(
            *(x.data_ptr(), x.shape[0], x.stride(0), panels.data_ptr(), factors.data_ptr()),
            *(scales.data_ptr(), row_sums.data_ptr(), bias.data_ptr()),
            *(x.shape[1], outputs, out.data_ptr(), torch.get_num_threads()),
        )
        return out


def pad_outputs(values: Tensor) -> Tensor:
    """Fills the first dimension up with zeros to whole panels."""
    missing = -values.shape[0] % PANEL
    return pad(values, (0, 0) * (values.dim() - 1) + (0, missing))


def _prepare(x: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Rows as C++ reads them, and a place for the results."""
    if x.stride(1) != 1 or x.stride(0) % _PAIR:
        x = x.contiguous()
    return x, x.new_empty(x.shape[0], outputs)
