"""Latent attention on a CPU, as an operator: `octavo::latent_attention`.

For decodes, absorbed products take the fewest multiplications; for long chunks of a prefill,
expanding the latents once takes fewer. The best way differs between a step's sequences, so the
kernel chooses: see kernels/cpu/latent_attention.cpp.
"""

# An operator's arguments are positional.
# ruff: noqa: PLR0917

import torch
from torch import Tensor, nn

from octavo.engine.attention.latent import PRODUCTS, AbsorbedProducts
from octavo.engine.attention.operator import DryRun, any_step, current_step
from octavo.engine.operators import define
from octavo.kernels import cpu
from octavo.kernels.cpu.latent import PackedLatents
from octavo.kernels.ops import write_kv


class PackedProducts(nn.Module):
    """An expansion's products, packed for the kernel.

    Args:
        products: The absorbed products of the expansion.
    """

    absorbing: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, products: AbsorbedProducts) -> None:
        super().__init__()
        assert cpu.latents is not None
        keys, values = products.keys.detach(), products.values.detach()
        self._key_dim, self._value_dim = keys.shape[1], values.shape[2]
        pack = cpu.latents.pack
        self.register_buffer("absorbing", pack(keys.transpose(1, 2)))
        self.register_buffer("keys", pack(keys))
        self.register_buffer("values", pack(values.transpose(1, 2)))

    def attend(
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
        rotated_dim = query.shape[2] - self._key_dim
        out: Tensor = torch.ops.octavo.latent_attention(
            *(query, key, self.absorbing, self.keys, self.values),
            *(self._value_dim, rotated_dim, layer, scale, sliding_window, soft_cap, chunk),
        )
        return out


def pack_latents(model: nn.Module) -> None:
    """Pack a model's absorbed products if this CPU has a kernel for them.

    Args:
        model: A model on a CPU, after `absorb_expansions`; changed in place.
    """
    if cpu.latents is None:
        return
    for module in model.modules():
        products: AbsorbedProducts | None = getattr(module, PRODUCTS, None)
        if products is not None and cpu.latents.takes(
            (*products.keys.shape[1:], products.values.shape[2]), products.keys.dtype
        ):
            setattr(module, PRODUCTS, PackedProducts(products))


def _attend(
    query: Tensor,
    key: Tensor,
    absorbing: Tensor,
    keys: Tensor,
    values: Tensor,
    value_dim: int,
    rotated_dim: int,
    layer: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    chunk: int | None,
) -> Tensor:
    if isinstance(step := any_step(), DryRun):
        step.calls.append(layer)
        return query.new_zeros(*query.shape[:2], value_dim)
    step = current_step()
    cache, _, group, written = step.layers[layer]
    metadata = step.groups[group]
    key_scale = step.kv_scales[layer][0] if step.kv_scales else 1.0
    if written:
        write_kv(key, None, cache, None, metadata.slot_mapping, key_scale=key_scale)
    return cpu.latent_attention(
        query,
        cache,
        metadata,
        PackedLatents(absorbing, keys, values, value_dim, rotated_dim),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        chunk=chunk,
        key_scale=key_scale,
    )


define(
    "latent_attention(Tensor query, Tensor key, Tensor absorbing, Tensor keys, Tensor values,"
    " int value_dim, int rotated_dim, int layer, float scale, int? sliding_window,"
    " float? soft_cap, int? chunk) -> Tensor",
    lambda query, *arguments: query.new_empty(*query.shape[:2], arguments[4]),  # value_dim
    writes=True,
    CompositeExplicitAutograd=_attend,
)
