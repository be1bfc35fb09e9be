"""Records the experts that a model chooses for each token, and makes it compute another run's.

Two experts may be nearly as good for a token. Then rounding alone decides which of them computes
it, and its logits in 16 bits may be far from those of the same model computed in another order. So
where a model is compared with another run of it, it computes the experts that this run chose, and
its own choices are compared apart from the logits.

`OperatorRouting` forces experts on any step whose experts are the operator of `packed_experts.py`,
traced ones among them; `module_routing.py` on the modules of a model.
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
        """Return the choice of some tokens."""
        return Choice(self.experts[start:end], self.weights[start:end])

    def unlike(self, expected: "Choice") -> float:
        """Return the share of experts that another run did not choose."""
        return 1 - float(self._common(expected).float().mean())

    def weight_error(self, expected: "Choice") -> float:
        """Return the relative error of the weights of another run's choice.

        A token counts only if all its experts are the same: a weight may be a share of their sum.
        """
        same = self._common(expected).all(1)
        weights, other = (choice.sorted_weights()[same] for choice in (self, expected))
        return float((weights - other).norm() / other.norm().clamp_min(1e-12))

    def _common(self, expected: "Choice") -> Tensor:
        """Return which experts another run chose too, `[num_tokens, chosen]` bool."""
        return (self.experts[:, :, None] == expected.experts[:, None, :]).any(2)

    def sorted_weights(self) -> Tensor:
        """Return the weights in the order of the experts' numbers."""
        return self.weights.gather(1, self.experts.argsort(1))


class Routing(Protocol):
    """Forces experts on a step."""

    def forced(self, choices: Sequence[Choice], first: int) -> AbstractContextManager[list[Choice]]:
        """Let a run within compute the experts of an earlier one.

        Args:
            choices: Choices of each layer, in order.
            first: The first row of the run's batch that computes them.

        Yields:
            The experts that the run would have chosen for these rows, in order, once it has run.
        """


class OperatorRouting:
    """Forces experts on a step that calls the operator `octavo::packed_experts`."""

    @contextmanager
    def forced(self, choices: Sequence[Choice], first: int) -> Iterator[list[Choice]]:
        """Let a run within compute the experts of an earlier one; see `Routing`.

        Raises:
            NotForcedError: It has other layers of experts.
        """
        assert kernels is not None
        replaced: list[Choice] = []
        contiguous = [(choice.experts, choice.weights) for choice in choices]
        with kernels.forced(contiguous, first) as pairs:
            yield replaced
        replaced.extend(Choice(*one) for one in pairs)
