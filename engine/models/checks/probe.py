"""Runs a model once to learn what attention it does, and refuses what Octavo has no kernel for.

Configs name the same figure in many ways and leave others out; what the model
hands to its attention function cannot be wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from octavo.engine.attention.interface import PAGED_ATTENTION
from octavo.engine.models.checks.masks import Mask, MaskFunction, UnknownMaskError, recognise

PROBE = "octavo_probe"
TOKENS = 3
"""Tokens of the probe's prompt."""

NAMED_REFUSALS = {
    "s_aux": "it uses attention sinks",
    "sinks": "it uses attention sinks",
    "position_bias": "its attention adds a position bias",
    "indices": "its attention is sparse: it selects keys by index",
    "block_indices": "its attention is sparse: it selects blocks of keys by index",
}
HARMLESS = frozenset(
    {
        *("dropout", "scaling", "softcap", "is_causal", "sliding_window", "position_ids"),
        *("use_cache", "cache_position", "past_key_values", "return_dict", "training"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    }
)
"""Keywords that say nothing that the mask does not, or that `octavo.attention` honours."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
        num_heads: of queries.
        num_kv_heads: of keys and values.
        key_dim: elements of a head of a key.
        value_dim: of a value.
        mask: which keys a query sees.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: Mask


@dataclass(slots=True)
class _Probe:
    """What a run of the model has shown so far."""

    max_position: int
    masks: list[tuple[torch.Tensor, torch.Tensor, Mask | UnknownMaskError]] = field(
        default_factory=list
    )
    layers: dict[int, LayerAttention] = field(default_factory=dict)


_probe: ContextVar[_Probe] = ContextVar("octavo_probe")


@torch.inference_mode()
def probe(model: PreTrainedModel, max_position: int) -> list[LayerAttention]:
    """Run a few tokens through a model and return what each layer's attention does.

    Leaves the model with paged attention, whose windows are those of its masks.

    Args:
        model: whose attention implementation can be changed.
        max_position: positions that it has.

    Raises:
        NotImplementedError: a layer's attention is of a kind that there is no kernel for.
    """
    found = _Probe(max_position)
    token = torch.ones((1, TOKENS), dtype=torch.int64, device=model.device)
    with attention_of(model, PROBE):
        reset = _probe.set(found)
        try:
            model(input_ids=token, use_cache=False)
        finally:
            _probe.reset(reset)
    if not found.layers:
        raise NotImplementedError("it does not call transformers' attention interface")
    if sorted(found.layers) != list(range(len(found.layers))):
        raise NotImplementedError("some of its layers do without attention")
    return [found.layers[layer] for layer in range(len(found.layers))]


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Give a model another attention implementation, and paged attention afterwards."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(PAGED_ATTENTION)


def _make_mask(
    *,
    mask_function: MaskFunction,
    use_vmap: bool = False,
    **arguments: Any,  # noqa: ANN401 - as `sdpa_mask` takes them
) -> torch.Tensor:
    """Stand in for transformers' mask functions: make the mask and remember what it is."""
    here = _probe.get()
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    tensor = sdpa_mask(mask_function=mask_function, use_vmap=use_vmap, **arguments)
    assert tensor is not None
    mask: Mask | UnknownMaskError
    try:
        mask = recognise(mask_function, max_position=here.max_position, use_vmap=use_vmap)
    except UnknownMaskError as error:  # which matters only if a layer takes it
        mask = error
    here.masks.append((tensor, tensor.clone(), mask))
    return tensor


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,  # noqa: ANN401 - whatever models pass
) -> tuple[torch.Tensor, None]:
    """Stand in for attention: remember the call, return zeros."""
    here = _probe.get()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise NotImplementedError(f"its {type(module).__name__} does not say of which layer it is")
    _check_call(here, layer, (query, key, value), keywords)
    mask = _known(here, layer, attention_mask)
    own: Any = module
    own.octavo_window = mask.window
    batch, num_heads, tokens, key_dim = query.shape
    here.layers[layer] = LayerAttention(num_heads, key.shape[1], key_dim, value.shape[3], mask)
    return query.new_zeros(batch, tokens, num_heads, value.shape[3]), None


def _check_call(
    here: _Probe, layer: int, operands: tuple[torch.Tensor, ...], keywords: dict[str, Any]
) -> None:
    """Refuse a call that paged attention would not answer as the model means it."""
    if layer in here.layers:
        raise NotImplementedError(f"its layer {layer} calls attention several times")
    for name, given in keywords.items():
        if given is None or given is False:
            continue
        if name in NAMED_REFUSALS:
            raise NotImplementedError(NAMED_REFUSALS[name])
        if name not in HARMLESS:
            raise NotImplementedError(f"its attention takes {name!r}, which Octavo does not know")
    query, key, value = operands
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2]:
        raise NotImplementedError(f"its layer {layer} attends to other than its own tokens")


def _known(here: _Probe, layer: int, given: torch.Tensor | None) -> Mask:
    """Return what a layer's mask is, by the tensor that was made for it.

    Raises:
        UnknownMaskError: it is of no known kind, or the model made it itself or changed it.
    """
    if given is None:
        raise UnknownMaskError(f"its layer {layer} attends without a mask, so not causally")
    for tensor, made, mask in here.masks:
        if (
            given.data_ptr() == tensor.data_ptr()
            and given.dtype == made.dtype
            and given.shape == made.shape
            and torch.equal(given, made)
        ):
            if isinstance(mask, UnknownMaskError):
                raise mask
            return mask
    raise UnknownMaskError(f"its layer {layer} computes a mask of its own")


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _make_mask)
