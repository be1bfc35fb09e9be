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
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.kernels import huge_pages

GROUP = 32  # inputs that share a scale in 4 bits, as in linear.h and GGUF
_FOUR = 4  # inputs per instruction, of 8 bits
_WORD = 4  # bytes


class LinearKernels:
    """Packs weights for the operators of linear.cpp.

    Args:
        operators: The operators, `torch.ops.octavo_cpu`.
        panel: Outputs of a panel. Half of a gated panel's are gates.

    Attributes:
        operators: The argument.
        panel: The argument.
    """

    def __init__(self, operators: Any, panel: int) -> None:  # noqa: ANN401 - any namespace
        self.operators, self.panel = operators, panel

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
        shape = -(-outputs // self.panel), inputs * size // _WORD, self.panel * _WORD // size
        out = weight.new_empty(shape)
        huge_pages.ask_for(out)
        self.operators.pack_words(weight, out)
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


def _pad(values: Tensor, whole: int) -> Tensor:
    return pad(values, (0, 0) * (values.dim() - 1) + (0, -values.shape[0] % whole))
