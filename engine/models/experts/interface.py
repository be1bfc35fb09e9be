"""The experts implementation that transformers models call.

Transformers' expert classes call theirs through `ExpertsInterface`, like attention through
`AttentionInterface`. So one function serves all of them.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS = "octavo_experts"
ZEROS = "octavo_zeros"
REPLACEMENT = "octavo_experts"
"""The name of the submodule of an expert layer that computes it."""


def _forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute a layer by its replacement or, without one, as transformers does.

    Args:
        module: The layer.
        hidden_states: `[num_tokens, hidden]`.
        top_k_index: `[num_tokens, chosen]` int64, the experts of each token.
        top_k_weights: `[num_tokens, chosen]`, their weights.

    Returns:
        `[num_tokens, hidden]`, of the dtype of `hidden_states`.
    """
    replacement: nn.Module | None = getattr(module, REPLACEMENT, None)
    if replacement is None:
        out: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    else:
        out = replacement(hidden_states, top_k_index, top_k_weights)
    return out


def _return_zeros(_: nn.Module, hidden_states: Tensor, *__: Tensor) -> Tensor:
    """Replace a layer without weights."""
    return hidden_states.new_zeros(hidden_states.shape)


def use_implementation(model: PreTrainedModel, name: str = EXPERTS) -> None:
    """Make a model's experts call a function here, if its class supports that."""
    model.set_experts_implementation(name)


def calls_implementation(module: nn.Module) -> bool:
    """Return whether an expert layer calls the function here."""
    config = getattr(module, "config", None)
    return getattr(config, "_experts_implementation", None) == EXPERTS


ExpertsInterface.register(EXPERTS, _forward)
ExpertsInterface.register(ZEROS, _return_zeros)
