"""Weights in fp8 with a scale per output, and inputs rounded to fp8 per token at run time.

For GPUs only. On a GPU without fp8 products, weights are unpacked and inputs are not rounded.
"""

from torch import Tensor, nn

from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.calibration import Inputs
from octavo.engine.models.quantization.gpu_weight import GpuWeight, round_to_fp8
from octavo.engine.models.quantization.on_gpu import FP8_TOLERANCE


class Fp8(Scheme):
    """8-bit floats; see this module's text."""

    tolerance = FP8_TOLERANCE
    on_cpus = False

    def convert(self, layer: nn.Linear, inputs: Inputs | None, *, is_head: bool) -> nn.Module:
        """Raise NotImplementedError: CPUs have no kernels for fp8."""
        raise NotImplementedError

    def bits(self, layer: nn.Linear, *, is_head: bool) -> int:  # noqa: ARG002
        """Return the bits per weight."""
        return 8

    def round_for_gpu(self, weight: Tensor) -> GpuWeight:
        """Round a weight to fp8."""
        return round_to_fp8(weight)


SCHEME = Fp8()
