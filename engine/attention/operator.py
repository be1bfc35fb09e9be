"""Paged attention as a PyTorch operator: `octavo::paged_attention`.

With an operator, the compiler captures a model in one graph. The operator takes the layer's index
instead of the cache: `attending` sets the current step around the model. With cache and block
tables as arguments, a compiled graph would hold thirty functional copies of one tensor, and each
call would wrap seven more tensors.

This module does not import transformers, which is slow to import.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypedDict

import torch

from octavo.engine.operators import define
from octavo.kernels.metadata import AttentionMetadata, LayerCache, StateCache
from octavo.kernels.ops import paged_attention, rotate_and_write, write_kv


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The batch and the cache of the current step.

    Attributes:
        groups: The batch's sequences and their cache slots, for each layer group.
        layers: Each layer's cache.
        kv_scales: Each layer's (key scale, value scale) of an fp8 cache; else None.
        states: Each state's location in the cache.
    """

    groups: Sequence[AttentionMetadata]
    layers: list[LayerCache]
    kv_scales: list[tuple[float, float]] | None = None
    states: Sequence[StateCache] = ()


@dataclass(frozen=True, slots=True)
class DryRun:
    """Replaces a step for runs without a cache, in which attention returns zeros.

    Attributes:
        calls: The layers that called attention, in order.
    """

    calls: list[int] = field(default_factory=list)


_step: ContextVar[PagedStep | DryRun] = ContextVar("octavo_paged_step")


@contextmanager
def attending(step: PagedStep | DryRun) -> Iterator[None]:
    """Set the step of the model that runs in this context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def any_step() -> PagedStep | DryRun | None:
    """Return the step of the current context, or None."""
    return _step.get(None)


def current_step() -> PagedStep:
    """Return the step of the current context.

    Raises:
        LookupError: There is none.
    """
    step = _step.get()
    assert isinstance(step, PagedStep)
    return step


class Scales(TypedDict):
    """The divisors of an fp8 cache's keys and values."""

    key_scale: float
    value_scale: float


def _attend(  # noqa: PLR0917 - an operator's arguments are positional
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    chunk: int | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one layer's attention in the current step: `octavo::paged_attention`.

    Args:
        query: `[num_tokens, num_heads, key_dim]`.
        key: `[num_tokens, num_kv_heads, key_dim]`.
        value: `[num_tokens, num_kv_heads, value_dim]`; the first elements of `key` if the layer's
            cache has no values.
        layer: Index of the layer.
        scale: Factor of the logits.
        sliding_window: See `octavo.kernels.ops.paged_attention`.
        soft_cap: See `octavo.kernels.ops.paged_attention`.
        chunk: See `octavo.kernels.ops.paged_attention`.
        sinks: See `octavo.kernels.ops.paged_attention`; contiguous.
        alibi_slopes: See `octavo.kernels.ops.paged_attention`; contiguous.
        cos: `[num_tokens, n]` float32, as for `octavo.kernels.ops.rotate_and_write`, if query and
            key are not rotated yet.
        sin: `[num_tokens, n]` float32, like `cos`.

    Returns:
        `[num_tokens, num_heads, value_dim]`.
    """
    step = _step.get()
    if isinstance(step, DryRun):
        step.calls.append(layer)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
    key_cache, value_cache, group, written = step.layers[layer]
    metadata = step.groups[group]
    key_scale, value_scale = step.kv_scales[layer] if step.kv_scales else (1.0, 1.0)
    scales = Scales(key_scale=key_scale, value_scale=value_scale)
    if cos is not None and sin is not None:  # if not `written`, this writes the same again
        assert value_cache is not None  # queries of latents are not rotated as a whole
        cache = (key_cache, value_cache, metadata.slot_mapping)
        query = rotate_and_write(query, key, value, cos, sin, *cache, **scales)
    elif written:
        kept = None if value_cache is None else value
        write_kv(key, kept, key_cache, value_cache, metadata.slot_mapping, **scales)
    return paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        chunk=chunk,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        value_dim=value.shape[2],
        **scales,
    )


OPERATOR = define(
    "paged_attention(Tensor query, Tensor key, Tensor value, int layer, float scale,"
    " int? sliding_window, float? soft_cap, int? chunk, Tensor? sinks, Tensor? alibi_slopes,"
    " Tensor? cos=None, Tensor? sin=None) -> Tensor",
    lambda query, _key, value, *_, **__: query.new_empty(*query.shape[:2], value.shape[2]),
    writes=True,
    CompositeExplicitAutograd=_attend,
)
"""`octavo::paged_attention`. It writes the cache, which is not an argument."""
