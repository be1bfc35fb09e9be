"""The interface of a quantization scheme, and its application to a model."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.deferred import held
from octavo.engine.models.experts.expert_layer import ExpertLayer, find_experts
from octavo.engine.models.experts.packed_experts import PackedExperts
from octavo.engine.models.experts.quantized_experts import QuantizedExperts
from octavo.engine.models.linear.fuse_linears import group_linears_by_input
from octavo.engine.models.linear.packed_linear import has_quantized_kernels, replace
from octavo.engine.models.linear.quantized_linear import Fp8Linear, QuantizedLinear
from octavo.engine.models.quantization.calibration import ExpertInputs, Inputs, calibrate
from octavo.engine.models.quantization.formats.block_layers import PackedBlocksLinear
from octavo.engine.models.quantization.gpu_weight import GpuWeight
from octavo.engine.models.quantization.on_gpu import quantize_on_gpu

MIN_REPORTED_SHARE = 0.02
"""Minimum share of the weights to report as unquantized: routers, for example, have less."""


class Scheme(ABC):
    """A way to store linear layers in fewer bits.

    Attributes:
        tolerance: Maximum error of the logits in the self-check; see `self_check.py`.
        takes_head: Whether to convert the head (hidden states to logits) too.
        on_cpus: Whether CPUs have kernels for it.
    """

    tolerance: ClassVar[float]
    takes_head: ClassVar[bool] = False
    on_cpus: ClassVar[bool] = True

    def reads_inputs(self, layer: nn.Linear, *, is_head: bool) -> bool:  # noqa: ARG002
        """Return whether `convert` needs a layer's inputs on the calibration text."""
        return True

    @abstractmethod
    def convert(self, layer: nn.Linear, inputs: Inputs | None, *, is_head: bool) -> nn.Module:
        """Return the quantized layer that replaces a linear layer.

        If `has_quantized_kernels(layer)`, this must be a `PackedLayer`.

        Args:
            layer: The layer, or several of the same input fused into one.
            inputs: The layer's inputs on the calibration text, if it `reads_inputs`.
            is_head: Whether the layer maps hidden states to logits.
        """

    @abstractmethod
    def bits(self, layer: nn.Linear, *, is_head: bool) -> int:
        """Return the stored bits per weight of a layer that `convert` converts.

        Args:
            layer: The layer.
            is_head: Whether the layer maps hidden states to logits.
        """

    @abstractmethod
    def round_for_gpu(self, weight: Tensor) -> GpuWeight:
        """Round a layer's weight, `[outputs, inputs]`, for a GPU's kernels."""

    def round_head_for_gpu(self, weight: Tensor) -> GpuWeight | None:  # noqa: ARG002
        """Round the head's weight; None leaves it unchanged."""
        return None

    def gpu_bits(self, *, is_head: bool) -> float:  # noqa: ARG002
        """Return a GPU's stored bits per weight of a rounded layer."""
        return 8

    def expert_bits(self, layer: ExpertLayer) -> int | None:  # noqa: ARG002
        """Return the bits per weight of experts; None if they stay unquantized."""
        return None

    def convert_experts(self, layer: ExpertLayer, inputs: ExpertInputs) -> PackedExperts | None:  # noqa: ARG002
        """Return a replacement for an expert layer; None if it does not change.

        Args:
            layer: The layer.
            inputs: Its inputs on the calibration text.
        """
        return None

    def quantize(
        self,
        model: PreTrainedModel,
        run: Callable[[], object],
        keeps: Callable[[nn.Linear], bool] = lambda _: False,
    ) -> None:
        """Replace a model's linear layers and experts, on a CPU.

        Args:
            model: The model; changed in place.
            run: Runs it on the calibration text.
            keeps: Returns whether a linear layer stays as it is.
        """
        experts = find_experts(model)
        head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        groups = [group for group in group_linears_by_input(model) if not keeps(group[0].layer)]
        if not self.takes_head:
            groups = [group for group in groups if group[0].layer is not head]
        read = {
            group[0].path
            for group in groups
            if self.reads_inputs(group[0].layer, is_head=group[0].layer is head)
        }
        inputs = calibrate(model, run, read, [layer.path for layer in experts])
        while groups:
            group = groups.pop()  # frees each once replaced
            first = group[0]
            layer_inputs = inputs.linears.get(first.path)
            convert = partial(self.convert, inputs=layer_inputs, is_head=first.layer is head)
            replace(model, group, convert, gates=has_quantized_kernels(first.layer))
        for layer in experts:
            rows = inputs.experts.get(layer.path)  # None if the model does not call the layer
            with held(layer.module):
                if rows is not None and (converted := self.convert_experts(layer, rows)):
                    layer.replace(converted)

    def quantize_on_gpu(self, model: PreTrainedModel, device: torch.device) -> None:
        """Replace a model's linear layers and experts by layers on a GPU.

        Args:
            model: The model; changed in place.
            device: The GPU.
        """

        def rounded(weight: Tensor, is_head: bool) -> GpuWeight | None:
            round_weight = self.round_head_for_gpu if is_head else self.round_for_gpu
            return round_weight(weight)

        quantize_on_gpu(model, device, rounded)


def unquantized_shares(model: PreTrainedModel) -> dict[str, float]:
    """Return the classes of layers, besides embeddings and head, that are not quantized.

    Examples are experts that Octavo does not recognize, or whose size no kernel supports.

    Returns:
        Each class's share of all weights, if at least `MIN_REPORTED_SHARE`.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    left: Counter[str] = Counter()
    for module in model.modules():
        if module is not head and not isinstance(module, nn.Embedding):
            parameters = module.parameters(recurse=False)
            left[type(module).__name__] += sum(
                weight.numel() for weight in parameters if weight.dim() > 1
            )
    quantized = sum(buffer.numel() for buffer in model.buffers() if buffer.dtype == torch.int8)
    quantized += sum(
        module.num_weights
        for module in model.modules()
        if isinstance(module, PackedExperts) and module.is_int4
    )
    quantized += sum(
        module.num_weights
        for module in model.modules()
        if isinstance(module, (PackedBlocksLinear, QuantizedLinear, Fp8Linear, QuantizedExperts))
    )
    total = max(1, quantized + left.total())
    shares = {name: count / total for name, count in left.items()}
    return {name: share for name, share in shares.items() if share >= MIN_REPORTED_SHARE}
