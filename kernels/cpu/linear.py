"""Linear layers in C++, with weights packed once.

oneDNN reaches the CPU's peak arithmetic with hundreds of rows. With the few rows of a decode step
it is far from peak memory bandwidth, and each call has overhead. All products of a step of
SmolLM2-135M, on 2 cores of an EPYC 9004 (peak 469 bfloat16 Gflop/s and about 45 GB/s), in ms:

    rows                  1      8     48    512
    bfloat16, oneDNN   14.6   14.3   44.2    340
    bfloat16, these     9.1    8.2   33.8    332
    8 bits, oneDNN     10.3   11.1   27.2    199  without rounding activations
    8 bits, these       5.0    5.4   20.6    192  with it

Layers with 4-bit weights are in blocks.py.
"""

from collections.abc import Sequence
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_float,
    c_int,
    c_int64,
    c_void_p,
)
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.kernels import huge_pages
from octavo.kernels.cpu.low_rank import LowRankKernels, LowRankSums
from octavo.kernels.low_rank import LowRankOfLayer

GROUP = 32  # inputs that share a scale in 4 bits, as in linear.h and GGUF
_PAIR, _FOUR = 2, 4  # inputs per instruction, of 16 and of 8 bits
_WORD = 4  # bytes


class Layer(Structure):
    """A layer; the same as in linear.h."""

    _fields_ = (
        *(("panels", c_void_p), ("bias", c_void_p)),
        *(("inputs", c_int64), ("outputs", c_int64)),
        *(("gated", c_int), ("epsilon", c_float)),
        *(("norm", c_void_p), ("residual", c_void_p), ("residual_stride", c_int64)),
        ("adapted", c_void_p),
    )
    sums: LowRankSums


class _Scales(Structure):
    """Scales of an 8-bit layer; the same as in linear.h."""

    _fields_ = (("factors", c_void_p), ("outputs", c_void_p), ("row_sums", c_void_p))


class LinearKernels:
    """The kernels of linear.cpp.

    Args:
        library: The compiled kernels.
        low_rank: The kernels for adapters, if layers have any.

    Attributes:
        panel: Outputs of a panel. Half of a gated panel's are gates.
    """

    def __init__(self, library: CDLL, low_rank: LowRankKernels | None = None) -> None:
        self._low_rank = low_rank
        self.panel = int(library.octavo_panel_outputs())
        rows, results = (c_void_p, c_int64, c_int64), (c_void_p, c_int)
        layer, scales = POINTER(Layer), POINTER(_Scales)
        self._linear, self._wide = library.octavo_linear, library.octavo_linear_wide
        self._float32 = library.octavo_linear_float32
        for function in (self._linear, self._wide, self._float32):
            function.argtypes, function.restype = (*rows, layer, *results), None
        self._int8 = library.octavo_linear_int8
        self._int8.argtypes, self._int8.restype = (*rows, layer, scales, *results), None
        self._pack = library.octavo_pack_words
        self._pack.argtypes, self._pack.restype = (*rows, c_int64, *results), None

    def pack(self, weight: Tensor) -> Tensor:
        """Pack weights into panels.

        Args:
            weight: `[outputs, inputs]`, bfloat16, float32 or int8, that `takes` accepts.

        Returns:
            `[panels, words, panel * elements of a word]`, of the same dtype.
        """
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        outputs, inputs = weight.shape
        size = weight.element_size()
        words = inputs * size // _WORD
        shape = -(-outputs // self.panel), words, self.panel * _WORD // size
        out = weight.new_empty(shape)
        huge_pages.ask_for(out)
        self._pack(
            *(weight.data_ptr(), weight.stride(0) * size, outputs, words),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def pack_int4(self, quantized: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Pack 4-bit weights into panels; each weight is `(quantized - 8) * scale + zero`.

        Args:
            quantized: `[outputs, groups, GROUP]`, from 0 to 15.
            scale: `[outputs, groups]` bfloat16.
            zero: `[outputs, groups]` bfloat16.

        Returns:
            `[panels, groups, bytes]` uint8.
        """
        return self._join_groups(quantized, (scale, zero))

    def pack_e2m1(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Pack weights in e2m1, whose groups share a power of two, into panels.

        Args:
            codes: `[outputs, groups, GROUP]`, from 0 to 15: the bits of each value.
            exponents: `[outputs, groups]` uint8, a group's exponent plus 127, from 0 to 254.

        Returns:
            `[panels, groups, bytes]` uint8.
        """
        # In ascending order of values: negative codes from 15 down, then positive ones.
        places = torch.where(codes > 7, 15 - codes, codes + 8)
        return self._join_groups(places, (exponents,))

    def _join_groups(self, codes: Tensor, scales: Sequence[Tensor]) -> Tensor:
        """Put each group's codes and scales side by side, panel by panel."""
        groups = codes.shape[1]
        # Each of an output's two lanes holds every other pair of inputs, four pairs per vector.
        vector = self.panel // 2
        lanes = self.pad_outputs(codes.int()).reshape(-1, 2, vector, groups, 4, 4, 2)
        lanes = lanes.permute(0, 3, 1, 4, 2, 6, 5)
        joined = (lanes << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1)
        nibbles = joined.to(torch.int32).to(torch.int16).flatten(2).contiguous()
        padded = [
            self.pad_outputs(values).reshape(-1, self.panel, groups).transpose(1, 2).contiguous()
            for values in scales
        ]
        return torch.cat([part.view(torch.uint8) for part in (nibbles, *padded)], dim=-1)

    def pad_outputs(self, values: Tensor) -> Tensor:
        """Pad the first dimension with zeros to whole panels."""
        return _pad(values, self.panel)

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        """Interleave the outputs of a gate and an up projection, as in gated panels.

        Args:
            gate: `[outputs, ...]`.
            up: `[outputs, ...]`, like `gate`.

        Returns:
            `[2 * outputs, each padded to whole panels, ...]`.
        """
        half = self.panel // 2
        if len(gate) % half:  # padding would otherwise copy them
            gate, up = _pad(gate, half), _pad(up, half)
        parts = [values.reshape(-1, half, *values.shape[1:]) for values in (gate, up)]
        return torch.stack(parts, 1).flatten(0, 2)

    @staticmethod
    def takes(inputs: int, dtype: torch.dtype) -> bool:
        """Return whether layers with this number of inputs and this dtype can be packed."""
        if dtype == torch.float32:
            return True
        return dtype in {torch.bfloat16, torch.int8} and inputs % _FOUR == 0

    def linear(  # noqa: PLR0917 - as the operator
        self,
        x: Tensor,
        outputs: int,
        panels: Tensor,
        bias: Tensor,
        gated: int = 0,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
        *,
        low_rank: LowRankOfLayer | None = None,
    ) -> Tensor:
        """Multiply by bfloat16 or float32 weights.

        Args:
            x: `[rows, inputs]`. All tensors but the bias have the weights' dtype.
            outputs: The number of outputs.
            panels: The packed weights.
            bias: `[padded outputs]` float32.
            gated: 1 if the panels are from `interleave`: each output is silu(gate) * up (SwiGLU,
                Shazeer 2020).
            norm: `[inputs]`, weights of an RMSNorm of x before the product (Zhang and
                Sennrich, 2019); None for no norm.
            epsilon: The norm's epsilon.
            residual: `[rows, outputs]` to add to outputs that are not gated.
            low_rank: Products of adapters, added before gates and residuals.

        Returns:
            `[rows, outputs]`, rounded once.
        """
        x, layer = self.prepare(
            *(x, outputs, panels, bias, gated, norm, epsilon, residual), low_rank=low_rank
        )
        out = x.new_empty(x.shape[0], outputs)
        multiply = self._float32 if x.dtype == torch.float32 else self._linear
        multiply(*rows_of(x), byref(layer), out.data_ptr(), torch.get_num_threads())
        return out

    def linear_wide(
        self,
        x: Tensor,
        outputs: int,
        panels: Tensor,
        bias: Tensor,
        *,
        low_rank: LowRankOfLayer | None = None,
    ) -> Tensor:
        """Multiply by bfloat16 weights as `linear` does, but return float32."""
        x, layer = self.prepare(x, outputs, panels, bias, low_rank=low_rank)
        out = x.new_empty(x.shape[0], outputs, dtype=torch.float32)
        self._wide(*rows_of(x), byref(layer), out.data_ptr(), torch.get_num_threads())
        return out

    def linear_int8(  # noqa: PLR0917 - as the operator
        self,
        x: Tensor,
        outputs: int,
        panels: Tensor,
        bias: Tensor,
        factors: Tensor,
        scales: Tensor,
        row_sums: Tensor,
        *fused: Any,  # noqa: ANN401 - as `linear`
        low_rank: LowRankOfLayer | None = None,
    ) -> Tensor:
        """Multiply by 8-bit weights; activations are rounded to 8 bits row by row.

        Args:
            x: `[rows, inputs]` bfloat16.
            outputs: The number of outputs.
            panels: The packed weights.
            bias: `[padded outputs]` float32.
            factors: `[inputs]` float32, factors of x before it is rounded.
            scales: `[padded outputs]` float32, factors of the weights.
            row_sums: `[padded outputs]` float32, the sum of each output's scaled weights.
            *fused: The last four positional arguments of `linear`.
            low_rank: Products of adapters, added before gates and residuals.

        Returns:
            `[rows, outputs]` bfloat16.
        """
        x, layer = self.prepare(x, outputs, panels, bias, *fused, low_rank=low_rank)
        out = x.new_empty(x.shape[0], outputs)
        struct = _Scales(factors.data_ptr(), scales.data_ptr(), row_sums.data_ptr())
        self._int8(
            *rows_of(x), byref(layer), byref(struct), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def prepare(  # noqa: PLR0917 - as the operators
        self,
        x: Tensor,
        outputs: int,
        panels: Tensor,
        bias: Tensor,
        gated: int = 0,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
        residual: Tensor | None = None,
        *,
        low_rank: LowRankOfLayer | None = None,
    ) -> tuple[Tensor, Layer]:
        """Return rows that C++ can read, and the layer with its adapters."""
        if x.stride(1) != 1 or x.stride(0) % _PAIR:
            x = x.contiguous()
        layer = Layer(panels.data_ptr(), bias.data_ptr(), x.shape[1], outputs, gated, epsilon)
        if norm is not None:
            layer.norm = norm.data_ptr()
        if residual is not None:
            assert residual.stride(1) == 1
            layer.residual, layer.residual_stride = residual.data_ptr(), residual.stride(0)
        if low_rank is not None:
            assert self._low_rank is not None
            layer.sums = self._low_rank.multiply_down(x, low_rank, layer)  # keeps the memory alive
            layer.adapted = layer.sums.address
        return x, layer


def _pad(values: Tensor, whole: int) -> Tensor:
    return pad(values, (0, 0) * (values.dim() - 1) + (0, -values.shape[0] % whole))


def rows_of(x: Tensor) -> tuple[int, int, int]:
    """Return rows as C++ takes them: their address, number and stride."""
    return x.data_ptr(), x.shape[0], x.stride(0)
