"""Finds layers of experts, and recognizes their activations.

Transformers' classes differ in the order of weights (transposed or not, gates before up projections
or alternating), in biases and in activations. `ExpertLayer` hides the first two. An activation is
recognized by its results for some inputs, not by its code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.experts.interface import (
    REPLACEMENT,
    ZEROS,
    calls_implementation,
    use_implementation,
)
from octavo.engine.models.shard import Shard
from octavo.kernels.activation import KINDS, Activation

log = structlog.get_logger(__name__)

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
SHARDS = "octavo_shards"
"""Name of a sharded expert layer's attribute: this rank's `Shard` of each weight, by its name."""
FAR = (12.0, 60.0, 300.0)
"""Magnitudes for trying an activation, besides common ones: most limits are smaller."""


@dataclass(frozen=True)
class ExpertLayer:
    """An expert layer that one operator can compute.

    Attributes:
        path: Its name in the model.
        module: The layer.
        activation: Its activation.
    """

    path: str
    module: nn.Module
    activation: Activation

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self._weights(self._up_name))

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self.up(0).shape[1]

    @property
    def inner(self) -> int:
        """Inputs of an expert's second product."""
        return self.down(0).shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self._weights(self._up_name).dtype

    @property
    def elements(self) -> int:
        """Elements of the weights of all experts."""
        return self._weights(self._up_name).numel() + self.downs().numel()

    @property
    def shards(self) -> tuple[Shard | None, Shard | None]:
        """This rank's shards of the first and the second weights; None if it holds the whole."""
        shards: Mapping[str, Shard] = getattr(self.module, SHARDS, {})
        return shards.get(self._up_name), shards.get("down_proj")

    def ups(self) -> Tensor:
        """Return the first weights of all experts, `[experts, projected, hidden]`."""
        return self.gates_first(self._oriented(self._weights(self._up_name)), 1)

    def up_biases(self) -> Tensor | None:
        """Return the first product's biases, `[experts, projected]`, if there are any."""
        biases = self._biases(self._up_name)
        return None if biases is None else self.gates_first(biases, 1)

    def downs(self) -> Tensor:
        """Return the second weights of all experts, `[experts, hidden, inner]`."""
        return self._oriented(self._weights("down_proj"))

    def down_biases(self) -> Tensor | None:
        """Return the second product's biases, `[experts, hidden]`, if there are any."""
        return self._biases("down_proj")

    def up(self, expert: int) -> Tensor:
        """Return an expert's first weights, `[projected, hidden]`, the gates first."""
        return self.gates_first(self._oriented(self._weights(self._up_name)[expert]), 0)

    def up_bias(self, expert: int) -> Tensor:
        """Return the first product's bias, `[projected]` float32; zeros if there is none."""
        biases = self._biases(self._up_name)
        if biases is None:
            return torch.zeros(len(self.up(expert)))
        return self.gates_first(biases[expert].float(), 0)

    def down(self, expert: int) -> Tensor:
        """Return an expert's second weights, `[hidden, inner]`."""
        return self._oriented(self._weights("down_proj")[expert])

    def down_bias(self, expert: int) -> Tensor:
        """Return the second product's bias, `[hidden]` float32; zeros if there is none."""
        biases = self._biases("down_proj")
        return torch.zeros(len(self.down(expert))) if biases is None else biases[expert].float()

    def gates_first(self, values: Tensor, dim: int) -> Tensor:
        """Put the gates before the up projections, as the kernels need them.

        Args:
            values: Tensor of any shape; one dimension has the outputs in the layer's order.
            dim: The outputs' dimension.
        """
        if not self.activation.gated or self.module.is_concatenated:
            return values
        alternating = values.movedim(dim, 0)
        return torch.cat([alternating[::2], alternating[1::2]]).movedim(0, dim)

    def replace(self, replacement: nn.Module) -> None:
        """Replace the layer's weights by a module that takes the same arguments."""
        for name in (self._up_name, "down_proj"):
            delattr(self.module, name)
            if hasattr(self.module, f"{name}_bias"):
                delattr(self.module, f"{name}_bias")
        setattr(self.module, REPLACEMENT, replacement)

    @property
    def _up_name(self) -> str:
        return "gate_up_proj" if self.activation.gated else "up_proj"

    def _weights(self, name: str) -> Tensor:
        weights: Tensor = getattr(self.module, name)
        return weights.detach()

    def _biases(self, name: str) -> Tensor | None:
        return self._weights(f"{name}_bias") if self.module.has_bias else None

    def _oriented(self, weights: Tensor) -> Tensor:
        """Return weights with inputs last."""
        return weights.transpose(-1, -2) if self.module.is_transposed else weights


def find_experts(model: PreTrainedModel) -> list[ExpertLayer]:
    """Find a model's expert layers that one operator can compute, and make them call it.

    Unrecognized layers are logged and do not change.
    """
    modules = expert_modules(model)
    if not modules:
        return []
    use_implementation(model)
    layers, left = [], set()
    for path, module in modules.items():
        activation = recognize(module) if calls_implementation(module) else None
        if activation is None:
            left.add(type(module).__name__)
        else:
            layers.append(ExpertLayer(path, module, activation))
    if left:
        log.info("experts are not recognized: they run as transformers has them", classes=left)
    return layers


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a model's expert layers with their own weights, by path.

    Their arguments: hidden states, the numbers of each token's experts, and their weights.
    """
    return {path: module for path, module in model.named_modules() if _holds_experts(module)}


def skip_experts(model: PreTrainedModel) -> None:
    """Make a model's expert layers return zeros, if its class supports that."""
    if expert_modules(model):
        use_implementation(model, ZEROS)


def _holds_experts(module: nn.Module) -> bool:
    """Return whether a module is of one of transformers' expert classes, with its own weights."""
    if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj")):
        return False
    weights = [getattr(module, name, None) for name in (_up_name(module), "down_proj")]
    return all(
        isinstance(weight, Tensor) and weight.dim() == 3 and weight.dtype in DTYPES
        for weight in weights
    )


def _up_name(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


@torch.inference_mode()
def recognize(module: Any) -> Activation | None:  # noqa: ANN401 - one of transformers' classes
    """Return the activation between a layer's products; None if no kernel supports it."""
    if getattr(module, "has_post_expert_norm", False):  # older transformers has no such norm
        return None
    gated = bool(module.has_gate)
    projected = _numbers()
    # In the layer's own order, if gates and up projections alternate.
    inputs = projected if not gated else _pairs(projected)
    arranged = inputs
    if gated and not module.is_concatenated:
        arranged = torch.stack(inputs.chunk(2, -1), -1).flatten(-2)
    try:
        expected = module._apply_gate(arranged) if gated else module.act_fn(arranged)  # noqa: SLF001
    except Exception:  # noqa: BLE001 - a model's code may raise anything
        return None
    for activation in _candidates(module, gated=gated):
        computed = activation(inputs)
        if computed.shape == expected.shape and torch.allclose(
            computed, expected, rtol=1e-4, atol=1e-5
        ):
            return activation
    return None


def _numbers() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    far = torch.tensor([sign * value for value in FAR for sign in (1.0, -1.0)])
    return torch.cat([3 * torch.randn(40, generator=generator), far, torch.zeros(1)])[None]


def _pairs(numbers: Tensor) -> Tensor:
    """Return all pairs of a gate and an up projection, gates first."""
    return torch.cartesian_prod(numbers[0], numbers[0]).t().flatten()[None]


def _candidates(module: nn.Module, *, gated: bool) -> Iterator[Activation]:
    """Yield the activations to try, with the layer's constants; first those without any."""
    if not gated:
        yield from (Activation(kind, gated=False) for kind in KINDS)
        return
    yield from map(Activation, KINDS)
    numbers = {
        float(value)
        for value in vars(module).values()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    }
    for kind, limit, offset in product(KINDS, sorted(numbers | {0.0}), (0.0, 1.0)):
        for alpha in sorted(numbers | {1.0}) if kind == "silu" else (1.0,):
            yield Activation(kind, True, alpha, limit, offset)
