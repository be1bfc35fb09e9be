"""Records and forces the routing of a model's expert layers; see `routing.py`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.experts.expert_layer import expert_modules


class ModuleRouting:
    """The expert layers of a model, whose weights may be replaced later.

    Args:
        model: The model, with its own weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = list(expert_modules(model).values())

    @contextmanager
    def recorded(self) -> Iterator[list[Choice]]:
        """Record runs within the context; yield the list that their choices are appended to."""
        choices: list[Choice] = []

        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            choices.append(_choice(inputs))

        with self._hooked(record):
            yield choices

    @contextmanager
    def forced(self, choices: Sequence[Choice], first: int) -> Iterator[list[Choice]]:
        """Make a run within the context use an earlier run's routing; see `Routing`."""
        replaced: list[Choice] = []
        with self._hooked(partial(_force, replaced, choices, first)):
            yield replaced

    @contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        handles = [layer.register_forward_pre_hook(hook) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _choice(inputs: tuple[Tensor, ...]) -> Choice:
    """Return a copy of a layer's arguments."""
    experts, weights = (tensor.to("cpu", copy=True).contiguous() for tensor in inputs[1:3])
    return Choice(experts, weights.float())


def _force(
    replaced: list[Choice],
    choices: Sequence[Choice],
    first: int,
    _: nn.Module,
    inputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    hidden, experts, weights, *more = inputs
    choice = choices[len(replaced)]
    rows = slice(first, first + len(choice.experts))
    replaced.append(_choice(inputs).part(rows.start, rows.stop))
    experts, weights = experts.clone(), weights.clone()
    experts[rows] = choice.experts.to(experts)
    weights[rows] = choice.weights.to(weights)
    return hidden, experts, weights, *more
