"""A stage of a pipeline: a model with some of its layers.

The other layers pass hidden states on, so that layers keep their numbers. A stage's first layer
takes the previous stage's hidden states instead of its own, and its last one sends its result to
the next. Both are operators, so a stage is traced, packed and quantized like any model.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.model_shape import ModelShape, StagePart
from octavo.engine.models.checks.probe import probe
from octavo.engine.models.experts.expert_layer import expert_modules
from octavo.engine.models.vision import make_text_part
from octavo.engine.parallel.collectives import receive_hidden, send_hidden
from octavo.engine.parallel.world import World

ALONE = "use --pipeline-parallel-size 1"
HARMLESS = frozenset(
    {
        *("hidden_states", "attention_mask", "causal_mask", "position_ids", "position_embeddings"),
        *("past_key_values", "past_key_value", "layer_past", "cache_position", "cache_params"),
        *("use_cache", "output_attentions", "output_router_logits", "layer_idx", "kwargs"),
        *("encoder_hidden_states", "encoder_attention_mask", "alibi", "mamba_attention_mask"),
    }
)
"""Arguments of layers that every stage computes itself, from positions alone."""


def plan_stages(config: PreTrainedConfig, stages: int, asked: Sequence[int]) -> list[range]:
    """Return the layers of each stage.

    Args:
        config: The model's config.
        stages: Number of stages.
        asked: Number of layers of each stage; empty: as even in memory as possible.

    Raises:
        UnsupportedModelError: The model cannot be split so; the message says why.
    """
    model = make_text_part(config)
    kind = config.get_text_config(decoder=True).model_type
    path = _layers_path(model)
    if path is None:
        raise UnsupportedModelError(
            f"models of the type {kind!r} cannot be split into stages: they have no one list of"
            f" layers: {ALONE}"
        )
    layers = list(model.get_submodule(path).children())
    for layer in layers:
        unknown = set(inspect.signature(layer.forward).parameters) - HARMLESS
        if unknown:
            raise UnsupportedModelError(
                f"models of the type {kind!r} cannot be split into stages: their layers take"
                f" {', '.join(sorted(unknown))} beside hidden states: {ALONE}"
            )
    if asked and sum(asked) != len(layers):
        raise UnsupportedModelError(
            f"--pipeline-split has {sum(asked)} layers, but the model has {len(layers)}"
        )
    if stages > len(layers):
        raise UnsupportedModelError(
            f"--pipeline-parallel-size is {stages}, but the model has {len(layers)} layers"
        )
    counts = asked or balance(_sizes(model, layers), stages)
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _sizes(model: PreTrainedModel, layers: Sequence[nn.Module]) -> list[int]:
    """Return the elements of each layer; embeddings count for the first, the head for the last."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    sizes = [_elements(layer) for layer in layers]
    sizes[0] += _elements(ends[0])
    sizes[-1] += 0 if ends[1] is None else _elements(ends[1])
    return sizes


def _elements(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def balance(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the number of layers of each stage for which the largest stage is the smallest.

    Args:
        sizes: The layers' sizes.
        stages: Number of stages, each with at least one layer.
    """

    @cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """Return the largest stage of the layers from `first` on, and the stages' counts."""
        rest = len(sizes) - first
        if left == 1:
            return sum(sizes[first:]), [rest]
        options = (
            (max(sum(sizes[first : first + count]), most), [count, *counts])
            for count in range(1, rest - left + 2)
            for most, counts in [best(first + count, left - 1)]
        )
        return min(options)

    return best(0, stages)[1]


def _layers_path(model: PreTrainedModel) -> str | None:
    """Return the path of a model's list of layers."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return next(
        (
            path
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ),
        None,
    )


class _Skipped(nn.Module):
    """A layer of another stage: returns its hidden states, as the layer would.

    Args:
        layer: The layer, whose plain attributes models read.
        in_tuple: Whether it returns a tuple.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Return the hidden states."""
        return (hidden_states,) if self._in_tuple else hidden_states


class _NoEmbedding(nn.Module):
    """Embeddings of a stage that receives hidden states: zeros.

    Args:
        embedding: The model's embeddings.
    """

    def __init__(self, embedding: Any) -> None:  # noqa: ANN401 - some are no nn.Embedding
        super().__init__()
        zeros = torch.zeros((1, embedding.weight.shape[1]), dtype=embedding.weight.dtype)
        self.weight = nn.Parameter(zeros, requires_grad=False)

    def forward(self, token_ids: Tensor, *_: Any) -> Tensor:  # noqa: ANN401
        """Return `[..., hidden]` zeros."""
        return nn.functional.embedding(torch.zeros_like(token_ids), self.weight)


class _NoHead(nn.Module):
    """The head of a stage that sends its hidden states: returns one column of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to `[..., 1]`."""
        return x[..., :1]


@contextmanager
def _observed(layers: nn.ModuleList) -> Iterator[dict[int, bool]]:
    """Yield whether each layer returns a tuple, by its number, once the model has run."""
    in_tuple: dict[int, bool] = {}

    def record(number: int, output: object) -> None:
        in_tuple[number] = isinstance(output, tuple)

    handles = [
        layer.register_forward_hook(lambda *call, number=i: record(number, call[2]))
        for i, layer in enumerate(layers)
    ]
    try:
        yield in_tuple
    finally:
        for handle in handles:
            handle.remove()


def keep_stage(
    model: PreTrainedModel, shape: ModelShape, own: range, world: World
) -> tuple[ModelShape, slice]:
    """Reduce a model to a stage's layers.

    Args:
        model: The model, whose dimensions have been found.
        shape: Its dimensions.
        own: The numbers of the stage's layers.
        world: The ranks; all of them call this.

    Returns:
        The dimensions with the stage's part; and which of the model's layers of experts it has.

    Raises:
        NotImplementedError: A layer uses the keys and values of another stage.
    """
    path = _layers_path(model)
    assert path is not None
    layers: Any = model.get_submodule(path)
    with _observed(layers) as in_tuple:
        probe(model, shape.max_position)
    for number, layer in enumerate(layers):
        if number not in own:
            layers[number] = _Skipped(layer, in_tuple=in_tuple[number])
    if world.stage:
        _receive(model, layers[own.start])
    if not world.is_last_stage:
        layers[own.stop - 1].register_forward_hook(_send)
        model.set_output_embeddings(_NoHead())  # type: ignore[no-untyped-call]
    calls, states = probe(model, shape.max_position, whole=False)
    counts = world.tell_all(len(calls), len(states), len(expert_modules(model)))
    firsts = [
        sum(each) for each in zip(*counts[: world.stage * world.size : world.size], strict=True)
    ]
    ranges = [
        range(first, first + count)
        for first, count in zip(firsts or (0, 0, 0), counts[world.place.rank], strict=True)
    ]
    part = StagePart(ranges[0], ranges[1])
    for number in part.layers:
        source = shape.layers[number].source
        if source is not None and source not in part.layers:
            raise NotImplementedError(
                f"its attention call {number} uses the keys of call {source}, which is in another"
                f" stage: choose another --pipeline-split, or {ALONE}"
            )
    return replace(shape, part=part), slice(ranges[2].start, ranges[2].stop)


def _receive(model: PreTrainedModel, first: nn.Module) -> None:
    """Make a stage's first layer take the previous stage's hidden states."""

    def take(
        _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (receive_hidden(arguments[0]), *arguments[1:]), named
        return (), named | {"hidden_states": receive_hidden(named["hidden_states"])}

    model.set_input_embeddings(_NoEmbedding(model.get_input_embeddings()))
    first.register_forward_pre_hook(take, with_kwargs=True)


def _send(_: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401 - a tensor or a tuple
    """Send a stage's last hidden states to the next stage."""
    if isinstance(output, tuple):
        return (send_hidden(output[0]), *output[1:])
    return send_hidden(output)
