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

4-bit weights take 2.5 ms for a row where 8-bit ones take 4.0, the last layer left out.
From 5 rows on the same weights in 8 bits are faster, so both are kept.
"""

from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # outputs; as in linear.h
GROUP = 32  # inputs that share a scale in 4 bits: as in linear.cpp, and in GGUF
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
        self._wide = library.octavo_linear_wide
        self._wide.argtypes, self._wide.restype = self._linear.argtypes, None
        self._int8 = library.octavo_linear_int8
        self._int8.argtypes = (*rows, *5 * (c_void_p,), c_int64, c_int64, c_void_p, c_int)
        self._int8.restype = None
        self._int4 = library.octavo_linear_int4
        self._int4.argtypes = (*rows, *6 * (c_void_p,), c_int64, c_int64, c_void_p, c_int)
        self._int4.restype = None

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
    def pack_int4(whole: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Lays 4-bit weights out in panels; each is `(whole - 8) * scale + zero`.

        Args:
            whole: `[outputs, groups, GROUP]`, from 0 to 15.
            scale: `[outputs, groups]` bfloat16.
            zero: as scale.

        Returns:
            `[panels, groups, bytes]` uint8.
        """
        groups = whole.shape[1]
        # An output's two lanes have every other pair of inputs, four pairs in each vector.
        lanes = pad_outputs(whole.int()).reshape(-1, PANEL // 16, 16, groups, 4, 4, 2)
        lanes = lanes.permute(0, 3, 1, 4, 2, 6, 5)
        joined = (lanes << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1)
        nibbles = joined.to(torch.int32).to(torch.int16).flatten(2).contiguous()
        scales = [
            pad_outputs(values).reshape(-1, PANEL, groups).transpose(1, 2).contiguous()
            for values in (scale, zero)
        ]
        return torch.cat([part.view(torch.uint8) for part in (nibbles, *scales)], dim=-1)

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

    def linear_wide(self, x: Tensor, panels: Tensor, bias: Tensor, outputs: int) -> Tensor:
        """Multiplies by bfloat16 weights; as `linear`, but returns the float32 sums."""
        x, _ = _prepare(x, 0)
        out = x.new_empty(x.shape[0], outputs, dtype=torch.float32)
        self._wide(
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

    def linear_int4(  # noqa: PLR0917 - as the operator
        self,
        x: Tensor,
        nibbles: Tensor,
        panels: Tensor,
        factors: Tensor,
        scales: Tensor,
        row_sums: Tensor,
        bias: Tensor,
        outputs: int,
    ) -> Tensor:
        """Multiplies by 4-bit weights if rows are few, else by the same ones in 8 bits.

        Args:
            x: `[rows, inputs]` bfloat16.
            nibbles: what `pack_int4` returned.
            panels: and the other arguments: as for `linear_int8`.
            factors: see there.
            scales: see there.
            row_sums: see there.
            bias: see there.
            outputs: how many there are.

        Returns:
            `[rows, outputs]` bfloat16.
        """
        x, out = _prepare(x, outputs)
        self._int4(
            *(x.data_ptr(), x.shape[0], x.stride(0), nibbles.data_ptr(), panels.data_ptr()),
            *(factors.data_ptr(), scales.data_ptr(), row_sums.data_ptr(), bias.data_ptr()),
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
