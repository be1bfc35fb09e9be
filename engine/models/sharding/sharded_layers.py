"""Layers that sum the ranks' parts.

Of two consecutive products, the first is split by outputs, like heads, and the second by inputs, so
that ranks sum only once, after the second.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.experts.expert_layer import expert_modules
from octavo.engine.parallel.collectives import sum_over_ranks
from octavo.engine.parallel.world import World


class SummedLinear(nn.Module):
    """A linear layer that is split by inputs: its outputs are sums over ranks.

    Args:
        linear: This rank's part; its bias becomes zero on all ranks but the first.
        world: The ranks.
    """

    def __init__(self, linear: nn.Module, world: World) -> None:
        super().__init__()
        self.linear = linear
        if world.rank:
            _clear_bias(linear, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs `[..., in_features / ranks]` to all ranks' outputs."""
        return sum_over_ranks(self.linear(x))


def _clear_bias(module: nn.Module, name: str) -> None:
    """Replace a module's bias, which may be in its file, by zeros."""
    bias = getattr(module, name, None)
    if isinstance(bias, Tensor):
        zeros = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
        setattr(module, name, nn.Parameter(zeros, requires_grad=False))


class VocabularyEmbedding(nn.Module):
    """Embeddings that are split by tokens.

    Args:
        embedding: This rank's part; a subclass keeps its factor.
        first: The first token of this rank.
    """

    def __init__(self, embedding: nn.Module, first: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.first = first
        marked: Any = embedding
        self.count = marked.num_embeddings = len(marked.weight)
        marked.padding_idx = None  # only matters in training

    @property
    def weight(self) -> Tensor:
        """This rank's embeddings, `[tokens, hidden]`, until they are packed."""
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map `[...]` token ids to `[..., hidden]`."""
        local_ids = token_ids - self.first
        is_here = (local_ids >= 0) & (local_ids < self.count)
        rows: Tensor = self.embedding(torch.where(is_here, local_ids, 0))
        return sum_over_ranks(rows * is_here[..., None])


def sum_experts(experts: nn.Module, world: World) -> None:
    """Make an expert layer, split by inner outputs, return sums over ranks."""
    if world.rank:
        _clear_bias(experts, "down_proj_bias")
    experts.register_forward_hook(lambda _, __, output: sum_over_ranks(output))


def sum_whole_experts(experts: nn.Module, world: World) -> None:
    """Make an expert layer, of which each rank has some experts, return sums over ranks."""
    marked: Any = experts
    count = marked.num_experts = marked.num_experts // world.size
    marked._is_expert_parallel = True  # noqa: SLF001 - transformers skips other ranks' experts

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, numbers, weights, *more = inputs
        return hidden, *own_experts(numbers, weights, count, world), *more

    experts.register_forward_pre_hook(take)
    experts.register_forward_hook(lambda _, __, output: sum_over_ranks(output))


def own_experts(
    numbers: Tensor, weights: Tensor, count: int, world: World
) -> tuple[Tensor, Tensor]:
    """Return a routing in this rank's numbers of experts; others get the number after the last.

    Args:
        numbers: The numbers of tokens' experts.
        weights: Their weights; those of other ranks' experts become zero.
        count: Experts of a rank.
        world: The ranks.
    """
    own = numbers - world.rank * count
    is_here = (own >= 0) & (own < count)
    return torch.where(is_here, own, count), weights * is_here


def own_choices(
    model: PreTrainedModel, choices: Sequence[Choice], world: World
) -> tuple[Choice, ...]:
    """Return recorded choices of experts in this rank's numbers; see `own_experts`."""
    layers: list[Any] = list(expert_modules(model).values())
    pairs = zip(layers, choices, strict=True)
    return tuple(Choice(*own_experts(*one, layer.num_experts, world)) for layer, one in pairs)
