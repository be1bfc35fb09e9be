"""Records the experts that a model chooses for each token, and forces another run's choices.

Two experts may be nearly equally good for a token. Then rounding decides which one computes it, and
its 16-bit logits may differ a lot from those of the same model in another order of computation. So
when a model is compared with another run, it uses that run's routing, and its own choices are
compared separately from the logits.

`OperatorRouting` forces experts on any step, traced or not, whose experts are the operator of
`packed_experts.py`; `module_routing.py` forces them on a model's modules.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from octavo.kernels.cpu import experts as kernels


class Choice(NamedTuple):
    """The experts that one layer chose.

    Attributes:
        experts: `[num_tokens, chosen]` int64.
        weights: `[num_tokens, chosen]` float32, the experts' weights.
    """

    experts: Tensor
    weights: Tensor

    def part(self, start: int, end: int) -> "Choice":
        """Return some tokens' choice."""
        return Choice(self.experts[start:end], self.weights[start:end])

    def unlike(self, expected: "Choice") -> float:
        """Return the share of experts that another run did not choose."""
        return 1 - float(self._common(expected).float().mean())

    def weight_error(self, expected: "Choice") -> float:
        """Return the relative error of the weights of another run's choice.

        A token counts only if all its experts are equal: a weight may be a share of their sum.
        """
        same = self._common(expected).all(1)
        weights, other = (choice.sorted_weights()[same] for choice in (self, expected))
        return float((weights - other).norm() / other.norm().clamp_min(1e-12))

    def _common(self, expected: "Choice") -> Tensor:
        """Return whether another run also chose each expert, `[num_tokens, chosen]` bool."""
        return (self.experts[:, :, None] == expected.experts[:, None, :]).any(2)

    def sorted_weights(self) -> Tensor:
        """Return the weights in the order of expert numbers."""
        return self.weights.gather(1, self.experts.argsort(1))


class Routing(Protocol):
    """Forces experts on a step."""

    def forced(self, choices: Sequence[Choice], first: int) -> AbstractContextManager[list[Choice]]:
        """Make a run within the context use an earlier run's routing.

        Args:
            choices: Choices of each layer, in order.
            first: The first row of the run's batch to force.

        Yields:
            The experts that the run would have chosen for these rows, in order, after it ran.
        """


class OperatorRouting:
    """Forces experts on a step that calls the operator `octavo::packed_experts`."""

    @contextmanager
    def forced(self, choices: Sequence[Choice], first: int) -> Iterator[list[Choice]]:
        """Make a run within the context use an earlier run's routing; see `Routing`.

        Raises:
            NotForcedError: The run has other expert layers.
        """
        assert kernels is not None
        replaced: list[Choice] = []
        contiguous = [(choice.experts, choice.weights) for choice in choices]
        with kernels.forced(contiguous, first) as pairs:
            yield replaced
        replaced.extend(Choice(*one) for one in pairs)
