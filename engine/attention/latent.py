"""Latent attention (DeepSeek-V2, 2024, section 2.1.2): the cache keeps latents.

transformers' modules expand a token's latent to each head's key and value by `expand_kv`, and call
attention with these. Both are products with one matrix. So the matrix can multiply the query
instead of the keys, and the weighted sum of latents instead of the values. Attention then has one
key for all heads, the latent and the rotated elements beside it, and the latent as its value.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octavo.engine.attention import operator as paged_attention  # noqa: F401 - defines the operator

EXPANSION, PRODUCTS = "octavo_expansion", "octavo_products"
"""Attributes of a module whose cache keeps latents: its `Expansion`, and after absorption the
`LatentProducts`."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """A module's expansion of latents to keys and values.

    Attributes:
        name: The linear layer that maps a latent to each head's key and value, in turn.
        key_dim: Elements of a key that come from a latent.
        value_dim: Elements of a value.
    """

    name: str
    key_dim: int
    value_dim: int


class LatentProducts(Protocol):
    """An expansion's products, as attention uses them."""

    def attend(  # noqa: PLR0917 - as the operator
        self,
        query: Tensor,
        key: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        chunk: int | None,
    ) -> Tensor:
        """Write latents to the cache, and attend to the keys and values that they expand to.

        Args:
            query: `[num_tokens, num_heads, key_dim + rest]`; its last elements match the part of a
                key that is kept beside the latent.
            key: `[num_tokens, 1, latent_dim + rest]`.
            layer: See `octavo::paged_attention`.
            scale: See `octavo::paged_attention`.
            sliding_window: See `octavo::paged_attention`.
            soft_cap: See `octavo::paged_attention`.
            chunk: See `octavo::paged_attention`.

        Returns:
            `[num_tokens, num_heads, value_dim]`.
        """


class AbsorbedProducts(nn.Module):
    """The two products of an expansion, absorbed into attention's queries and results.

    Args:
        expansion: The layer that maps latents to keys and values.
        weight: `[num_heads * (key_dim + value_dim), latent_dim]`, of its linear layer.
    """

    def __init__(self, expansion: Expansion, weight: Tensor) -> None:
        super().__init__()
        self._key_dim, each = expansion.key_dim, expansion.key_dim + expansion.value_dim
        by_head = weight.detach().view(len(weight) // each, each, weight.shape[1])
        keys, values = by_head[:, : self._key_dim], by_head[:, self._key_dim :].transpose(1, 2)
        # With strided weights, products of few tokens take up to ten times as long.
        self.keys = nn.Parameter(keys.contiguous(), requires_grad=False)
        self.values = nn.Parameter(values.contiguous(), requires_grad=False)

    def attend(  # noqa: PLR0917 - as the operator
        self,
        query: Tensor,
        key: Tensor,
        layer: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        chunk: int | None,
    ) -> Tensor:
        """Write latents to the cache and attend; see `LatentProducts`."""
        output = torch.ops.octavo.paged_attention(
            self.absorb(query.transpose(0, 1)).transpose(0, 1),
            key,
            key[..., : self.keys.shape[2]],
            *(layer, scale, sliding_window, soft_cap, chunk, None, None),
        )
        return self.expand(output.transpose(0, 1)).transpose(0, 1)

    def absorb(self, query: Tensor) -> Tensor:
        """Map queries, which match keys, to queries that match latents.

        Args:
            query: `[num_heads, num_tokens, key_dim + rest]`; its last elements match the part of a
                key that is kept beside the latent.

        Returns:
            `[num_heads, num_tokens, latent_dim + rest]`.
        """
        of_latents = query[..., : self._key_dim].bmm(self.keys)
        return torch.cat([of_latents, query[..., self._key_dim :]], -1)

    def expand(self, latents: Tensor) -> Tensor:
        """Map `[num_heads, num_tokens, latent_dim]` to values, `[..., value_dim]`."""
        return latents.bmm(self.values)


def absorb_expansions(model: nn.Module) -> None:
    """Let modules with an `Expansion` call attention with latents, and absorb its products.

    transformers' own forward does not run afterwards.

    Args:
        model: Changed in place.
    """
    for module in model.modules():
        expansion: Expansion | None = getattr(module, EXPANSION, None)
        if expansion is not None:
            linear: nn.Module = module.get_submodule(expansion.name)
            products = AbsorbedProducts(expansion, linear.get_parameter("weight"))
            setattr(module, expansion.name, None)  # frees it: memory may not hold all twice
            attention: Any = module
            attention.octavo_products, attention.expand_kv = products, _keep


def _keep(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replace `expand_kv`: return the one key and value of a token."""
    return torch.cat([latent, rotated], -1), latent


def absorbed_linears(model: nn.Module) -> dict[nn.Module, Expansion]:
    """Return the linear layers that `absorb_expansions` would replace."""
    expansions: dict[nn.Module, Expansion | None] = {
        module: getattr(module, EXPANSION, None) for module in model.modules()
    }
    return {
        module.get_submodule(expansion.name): expansion
        for module, expansion in expansions.items()
        if expansion
    }
