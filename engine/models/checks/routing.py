"""Which experts a model chooses for each token, recorded in one run and repeated in another.

Two experts may be nearly as good for a token. Then rounding alone decides which of them computes
it, and its logits in 16 bits may be far from those of the same model in 16 bits computed in another
order. So where a model is compared with another run of it, it computes the experts that this run
chose, and its own choices are compared apart from the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.experts.expert_layer import expert_modules


class Choice(NamedTuple):
    """What one layer chose.

    Attributes:
        experts: `[num_tokens, chosen]` int64.
        weights: `[num_tokens, chosen]`, theirs.
    """

    experts: Tensor
    weights: Tensor

    def error(self, expected: "Choice") -> float:
        """Return how unlike another run's choice this is.

        It is the share of experts that the other run did not choose, or the relative error of the
        weights of those that both chose, if that is greater. A token counts for the latter if all
        of its experts are the same, as weights may be shares of their sum.
        """
        common = (self.experts[:, :, None] == expected.experts[:, None, :]).any(2)
        unlike = 1 - float(common.float().mean())
        same = common.all(1)
        own, other = (choice.sorted_weights()[same] for choice in (self, expected))
        if not len(own):
            return unlike
        return max(unlike, float((own - other).norm() / other.norm().clamp_min(1e-12)))

    def sorted_weights(self) -> Tensor:
        """Return the weights in the order of the experts' numbers, in float32."""
        return self.weights.float().gather(1, self.experts.argsort(1))


class Routing:
    """The layers of experts of a model, whose weights may be replaced later.

    Args:
        model: The model, with its own weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = list(expert_modules(model).values())

    @contextmanager
    def recorded(self) -> Iterator[list[Choice]]:
        """Record a run within; yield the list that its choices are appended to."""
        choices: list[Choice] = []
        with self._hooked(lambda _: partial(_record, choices)):
            yield choices

    @contextmanager
    def forced(self, choices: Sequence[Choice]) -> Iterator[list[Choice]]:
        """Let a run within compute the experts of an earlier one; yield as `recorded` does."""
        own: list[Choice] = []
        with self._hooked(lambda layer: partial(_force, own, choices[layer])):
            yield own

    @contextmanager
    def _hooked(self, make: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        handles = [
            layer.register_forward_pre_hook(make(number))
            for number, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _record(choices: list[Choice], _: nn.Module, given: tuple[Tensor, ...]) -> None:
    choices.append(Choice(given[1].clone(), given[2].clone()))


def _force(
    own: list[Choice], choice: Choice, _: nn.Module, given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    hidden, experts, weights, *more = given
    own.append(Choice(experts.clone(), weights.clone()))
    return hidden, choice.experts, choice.weights.to(weights.dtype), *more
