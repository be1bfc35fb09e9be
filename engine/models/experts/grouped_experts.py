"""Expert layers on a GPU, by the kernels of `octavo.kernels.triton.experts`.

The weights keep transformers' layout, as the kernels take any strides. Only alternating gates and
up projections are reordered.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.experts.expert_layer import ExpertLayer, find_experts
from octavo.engine.operators import define
from octavo.kernels import reference
from octavo.kernels.activation import KINDS, Activation

DTYPES = {torch.bfloat16, torch.float16}


class GroupedExperts(nn.Module):
    """All experts of a layer.

    Args:
        layer: The layer to replace.
    """

    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__()
        self._activation = layer.activation
        self.register_buffer("up", layer.ups())
        self.register_buffer("up_bias", layer.up_biases())
        self.register_buffer("down", layer.downs())
        self.register_buffer("down_bias", layer.down_biases())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute each token's experts; see `interface.py`."""
        out: Tensor = torch.ops.octavo.grouped_experts(
            *(hidden_states, top_k_index, top_k_weights.float()),
            *(self.up, self.up_bias, self.down, self.down_bias),
            *self._activation.arguments,
        )
        return out


def group_experts(model: PreTrainedModel) -> None:
    """Replace a model's expert layers if there are kernels for them.

    Args:
        model: A model on a GPU; changed in place.
    """
    for layer in find_experts(model):
        if layer.dtype in DTYPES:
            layer.replace(GroupedExperts(layer))


def _on_gpu(  # noqa: PLR0917 - as the operator
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *activation: float,
) -> Tensor:
    from octavo.kernels.triton.experts import experts  # noqa: PLC0415 - needs Triton

    return experts(x, expert_ids, weights, up, up_bias, down, down_bias, activation_of(*activation))


def _on_cpu(  # noqa: PLR0917 - as the operator
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *activation: float,
) -> Tensor:
    """Compute the same on a CPU, for tests only: an engine on a CPU uses `PackedExperts`."""
    return reference.experts(
        x, expert_ids, weights, up, up_bias, down, down_bias, activation_of(*activation)
    )


def activation_of(kind: float, gated: float, *numbers: float) -> Activation:
    """Return the activation that an operator's arguments describe."""
    return Activation(list(KINDS)[int(kind)], bool(gated), *numbers)


define(
    "grouped_experts(Tensor x, Tensor expert_ids, Tensor weights, Tensor up, Tensor? up_bias,"
    " Tensor down, Tensor? down_bias, int activation, int gated, float alpha, float limit,"
    " float offset) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    CUDA=_on_gpu,
    CPU=_on_cpu,
)
