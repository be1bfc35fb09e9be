"""Runs a model once to learn its attention, and refuses layers that Octavo has no kernel for.

Configs have many names for one dimension and lack others, but the arguments of the model's
attention function are always right.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import conv1d, embedding
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from octavo.common.models.image_families import IMAGE_FAMILIES
from octavo.engine.attention.interface import PAGED_ATTENTION, PROBE, Call, number_calls
from octavo.engine.attention.latent import EXPANSION, Expansion
from octavo.engine.attention.state_functions import (
    CONVOLUTION,
    DELTAS,
    SSD,
    number_states,
    recording,
    replace_functions,
)
from octavo.engine.model_shape import LayerShape, StateShape
from octavo.engine.models.checks.latents import Expanded, find_expansion, watching_expansions
from octavo.engine.models.checks.masks import (
    FULL,
    Mask,
    MaskFunction,
    UnknownMaskError,
    recognize,
)
from octavo.kernels.states import ACTIVATIONS

CONVOLUTION_CHANNELS, SCAN_CHANNELS = 1024, 256
"""Channels per row of a state: rows of some kilobytes fill blocks of any size well."""
TOKENS = 3
"""Number of tokens of the probe's prompt."""
SHIFT = 5
"""The position of the first token in the second run."""
LINEAR, COMPRESSED = "linear_attention", "compressed"
"""Values of a config's `layer_types`: a stateful layer, and a part of the names of layers whose
keys each represent several tokens."""

NAMED_REFUSALS = {
    "sinks": "its attention sinks differ from token to token",
    "position_bias": "its attention adds a position bias",
    "indices": "its attention is sparse: it selects keys by index",
    "block_indices": "its attention is sparse: it selects blocks of keys by index",
}
HARMLESS = frozenset(
    {
        *("dropout", "scaling", "softcap", "s_aux", "alibi_slopes", "is_causal", "sliding_window"),
        *("local_window", "position_ids"),
        *("use_cache", "cache_position", "past_key_values", "return_dict", "training"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    }
)
"""Keywords that repeat the mask, or that paged attention supports."""


@dataclass(slots=True)
class _Probe:
    """The record of a run of the model, so far."""

    max_position: int
    masks: list[tuple[torch.Tensor, torch.Tensor, Mask | UnknownMaskError]] = field(
        default_factory=list
    )
    layers: list[LayerShape] = field(default_factory=list)
    states: list[StateShape] = field(default_factory=list)
    keepers: dict[torch.nn.Module, list[int]] = field(default_factory=dict)
    running: list[torch.nn.Module] = field(default_factory=list)
    operands: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    calls: dict[torch.nn.Module, list[Call]] = field(default_factory=dict)
    recurrences: int = 0
    looked_up: list[torch.Tensor] = field(default_factory=list)
    expanded: dict[torch.nn.Module, Expanded] = field(default_factory=dict)
    expansions: dict[torch.nn.Module, Expansion] = field(default_factory=dict)


_probe: ContextVar[_Probe] = ContextVar("octavo_probe")


@torch.no_grad()  # inference mode conflicts with the modes of `running_empty`
def probe(
    model: PreTrainedModel, max_position: int, *, whole: bool = True
) -> tuple[tuple[LayerShape, ...], tuple[StateShape, ...]]:
    """Run a few tokens through a model.

    Returns:
        The shapes of the attention calls, and of the calls that keep a state, in order.

    It leaves the model with paged attention, with windows and chunks as in its masks, and with the
    expansions of latents for `absorb_expansions`.

    Args:
        model: The model.
        max_position: Its context.
        whole: Whether it has all layers that its config names; a stage has not.

    Raises:
        NotImplementedError: No kernel computes a layer's attention.
    """
    replace_functions(model)
    observed = _run(model, max_position)
    counted = [rows for rows in observed.looked_up if _count(rows)]
    if counted:
        shift = min(SHIFT, max_position - TOKENS)
        shifted = _run(model, max_position, shift).looked_up
        if not all(any(torch.equal(rows + shift, other) for other in shifted) for rows in counted):
            raise NotImplementedError("it numbers the positions of its tokens itself")
    if not observed.layers and not observed.states:
        raise NotImplementedError("it does not call transformers' attention interface")
    if whole:
        _check_layer_types(model, observed)
    for module, numbers in observed.keepers.items():
        number_states(module, numbers)
    number_calls(model, observed.calls)
    for module, expansion in observed.expansions.items():
        setattr(module, EXPANSION, expansion)
    return tuple(observed.layers), tuple(observed.states)


def _check_layer_types(model: PreTrainedModel, observed: _Probe) -> None:
    """Refuse layers whose state does not show in a run of few tokens.

    Raises:
        NotImplementedError: A config names such layers.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if compressed := next((kind for kind in sorted(kinds) if COMPRESSED in kind), None):
        raise NotImplementedError(f"its {compressed} attends to sums of tokens")
    if LINEAR in kinds and not observed.recurrences:
        raise NotImplementedError("its linear attention keeps a state in its own code")


def _run(model: PreTrainedModel, max_position: int, shift: int | None = None) -> _Probe:
    """Run a few tokens through a model; return the record.

    Args:
        model: The model.
        max_position: Its context.
        shift: The first token's position. Default: the model's own.
    """
    observed = _Probe(max_position)
    tokens = torch.ones((1, TOKENS), dtype=torch.int64, device=model.device)
    positions: dict[str, Any] = {}
    if shift is not None:
        positions["position_ids"] = shift + torch.arange(TOKENS, device=model.device)[None]
    recorder = partial(_record_state, observed)
    with (
        attention_of(model, PROBE),
        _following(model, observed),
        recording(recorder),
        watching_expansions(model) as observed.expanded,
    ):
        reset = _probe.set(observed)
        try:
            with _Calls(observed):
                model(input_ids=tokens, use_cache=False, **positions)
        finally:
            _probe.reset(reset)
    return observed


class _Calls(TorchFunctionMode):
    """Records the rows of embeddings that a model looks up, and refuses convolutions.

    Args:
        observed: The record that gets them.
    """

    def __init__(self, observed: _Probe) -> None:
        super().__init__()
        self._observed = observed

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - torch has no public type for it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function; record the rows if it looks up embeddings.

        Raises:
            NotImplementedError: It is a convolution, whose state Octavo does not keep.
        """
        if function is conv1d:
            raise NotImplementedError("it convolves over tokens in its own code")
        if function is embedding:
            self._observed.looked_up.append(args[0].flatten().clone())
        return function(*args, **(kwargs or {}))


def _count(rows: torch.Tensor) -> bool:
    """Return whether rows count up: only positions do so, as all tokens are the same."""
    return len(rows) == TOKENS and bool((rows.diff() == 1).all())


@contextmanager
def _following(model: PreTrainedModel, observed: _Probe) -> Iterator[None]:
    """Record the running modules, the innermost last."""
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda m, _: observed.running.append(m)))
        hooks.append(module.register_forward_hook(lambda *_: _drop_last(observed.running)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop_last(modules: list[torch.nn.Module]) -> None:
    modules.pop()


def _record_state(observed: _Probe, name: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
    """Replace a function that updates a state: record the call and return zeros."""
    observed.keepers.setdefault(observed.running[-1], []).append(len(observed.states))
    if name == CONVOLUTION:
        channels, width = arguments["weight"].shape
        activation = arguments.get("activation")
        if activation not in ACTIVATIONS:
            raise NotImplementedError(f"its convolution is followed by {activation!r}")
        observed.states.append(_in_rows(channels, width - 1, CONVOLUTION_CHANNELS, False))
        return torch.zeros_like(arguments["hidden_states"])
    observed.recurrences += 1
    if name == SSD:
        _, _, heads, head_dim = arguments["hidden_states"].shape
        observed.states.append(StateShape(heads, (head_dim, arguments["B"].shape[-1]), True))
        return torch.zeros_like(arguments["hidden_states"])
    if name in DELTAS:
        heads, value_dim = arguments["value"].shape[2:]
        observed.states.append(StateShape(heads, (arguments["key"].shape[-1], value_dim), True))
        return torch.zeros_like(arguments["value"]), None
    channels, size = arguments["A"].shape
    observed.states.append(_in_rows(channels, size, SCAN_CHANNELS, True))
    return torch.zeros_like(arguments["hidden_states"])


def _in_rows(channels: int, width: int, most: int, full_precision: bool) -> StateShape:
    """Return the shape of a state per channel, in rows of at most `most` channels."""
    per_row = min(channels, most)
    return StateShape(-(-channels // per_row), (per_row, width), full_precision)


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch a model to another attention implementation, and to paged attention afterwards."""
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, PAGED_ATTENTION)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch a model to another attention implementation."""
    if model._can_set_attn_implementation():  # noqa: SLF001 - no public name
        # A vision part is not the model's any more; see `split_vision`.
        in_text = {"": name, "text_config": name}
        images = model.config.model_type in IMAGE_FAMILIES
        model.set_attn_implementation(in_text if images else name)
        return
    # transformers does not switch classes that do not call its interface.
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config._attn_implementation_internal = name  # noqa: SLF001


def _make_mask(
    *,
    mask_function: MaskFunction,
    use_vmap: bool = False,
    **arguments: Any,  # noqa: ANN401 - as `sdpa_mask` takes them
) -> torch.Tensor:
    """Replace transformers' mask functions: create the mask and record its type."""
    state = _probe.get()
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    tensor = sdpa_mask(mask_function=mask_function, use_vmap=use_vmap, **arguments)
    assert tensor is not None
    mask: Mask | UnknownMaskError
    try:
        mask = recognize(mask_function, max_position=state.max_position, use_vmap=use_vmap)
    except UnknownMaskError as error:  # matters only if a layer uses it
        mask = error
    state.masks.append((tensor, tensor.clone(), mask))
    return tensor


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,  # noqa: ANN401 - whatever models pass
) -> tuple[torch.Tensor, None]:
    """Replace attention: record the call and return zeros."""
    state = _probe.get()
    layer = len(state.layers)
    _check_call(module, (query, key, value), keywords)
    mask = _find_mask(state, layer, attention_mask)
    if (window := keywords.get("local_window")) is not None:
        if mask != FULL:
            raise UnknownMaskError(f"its layer {layer} has both a window and another mask")
        mask = Mask(window)
    calls = state.calls.setdefault(module, [])
    calls.append(Call(layer, mask.window, mask.chunk))
    batch, num_heads, tokens, key_dim = query.shape
    shape = LayerShape(num_heads, key.shape[1], key_dim, value.shape[3])
    if latent := find_expansion(module, state.expanded.get(module), query, key, value):
        state.expansions[module], shape = latent
    shape = replace(shape, window=mask.window, chunk=mask.chunk)
    state.layers.append(replace(shape, source=_find_source(state, shape, key, value)))
    if state.layers[calls[0].layer].latent != shape.latent:
        raise NotImplementedError(f"only some of its {type(module).__name__}'s calls take latents")
    state.operands.append((key, value))
    return query.new_zeros(batch, tokens, num_heads, value.shape[3]), None


def _find_source(
    state: _Probe, shape: LayerShape, key: torch.Tensor, value: torch.Tensor
) -> int | None:
    """Return the earlier call with the same mask, keys and values."""
    for layer, (other_key, other_value) in enumerate(state.operands):
        if key is other_key and value is other_value and state.layers[layer] == shape:
            return layer
    return None


def _check_call(
    module: torch.nn.Module,
    operands: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
) -> None:
    """Refuse a call that paged attention does not support."""
    for name, argument in keywords.items():
        if argument is None or argument is False:
            continue
        if name in NAMED_REFUSALS:
            raise NotImplementedError(NAMED_REFUSALS[name])
        if name not in HARMLESS:
            raise NotImplementedError(
                f"its attention takes {name!r}, which Octavo does not support"
            )
    query, key, value = operands
    sinks = keywords.get("s_aux")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise NotImplementedError(NAMED_REFUSALS["sinks"])
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2]:
        raise NotImplementedError(
            f"its {type(module).__name__} attends to other tokens than its own"
        )


def _find_mask(state: _Probe, layer: int, passed: torch.Tensor | None) -> Mask:
    """Return a layer's mask, recognized by its tensor.

    Raises:
        UnknownMaskError: The kernels do not support it, or the model created or changed it itself.
    """
    if passed is None:
        raise UnknownMaskError(f"its layer {layer} has no mask, so its attention is not causal")
    for tensor, made, mask in state.masks:
        if (
            passed.data_ptr() == tensor.data_ptr()
            and passed.dtype == made.dtype
            and passed.shape == made.shape
            and torch.equal(passed, made)
        ):
            if isinstance(mask, UnknownMaskError):
                raise mask
            return mask
    raise UnknownMaskError(f"its layer {layer} computes its own mask")


AttentionInterface.register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _make_mask)
