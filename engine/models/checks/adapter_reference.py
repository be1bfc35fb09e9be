"""The results of transformers' forward pass with a LoRA adapter for the self-check.

The adapter adapts every linear layer that runs for all tokens, with random matrices whose products
are a fixed share of each layer's outputs. So a layer that adds nothing, or adds it in the wrong
place, changes the logits by more than rounding and quantization do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.engine.models.checks.adapter_matrices import trial_matrices
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.reference import Reference, forward_logits, with_rounding
from octavo.engine.models.checks.widened import is_narrow, widened

SHARE = 0.5
"""The size of a layer's low-rank products, as a share of the size of its own outputs."""
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class TrialReference:
    """The results of transformers with the trial adapter.

    Attributes:
        expected: The reference with the adapter.
        scales: Scales by the name of each adapted layer.
    """

    expected: Reference
    scales: Mapping[str, float]


@torch.inference_mode()
def trial_reference(
    model: nn.Module,
    plain: Reference,
    routing: ModuleRouting,
    left_out: Collection[str],
) -> TrialReference:
    """Run transformers' forward pass with the trial adapter.

    Args:
        model: A transformers model with transformers' own attention.
        plain: The results without the adapter.
        routing: The routing of its expert layers.
        left_out: Names of linear layers that adapters cannot adapt.
    """
    adaptable = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) in {nn.Linear, Conv1D} and name not in left_out
    }
    scales: dict[str, float] = {}
    partly: set[str] = set()

    def measure(name: str, x: Tensor, out: Tensor, product: Tensor) -> None:
        if x.numel() != len(plain.tokens) * x.shape[-1]:
            partly.add(name)
        size = product.square().mean().sqrt().clamp_min(TINY)
        scales.setdefault(name, float(SHARE * out.float().square().mean().sqrt() / size))

    with _hooked(adaptable, measure):
        forward_logits(model, plain.tokens)
    scales = {name: scale for name, scale in scales.items() if name not in partly}

    def add(name: str, _: Tensor, out: Tensor, product: Tensor) -> Tensor:
        return (out.float() + scales[name] * product).to(out.dtype)

    with _hooked({name: adaptable[name] for name in scales}, add):
        with widened(model), routing.recorded() as recorded:
            logits = forward_logits(model, plain.tokens)
        expected = Reference(plain.tokens, logits, torch.zeros(len(logits)), tuple(recorded))
        if is_narrow(model):
            expected = with_rounding(expected, model, routing)
    return TrialReference(expected, scales)


@contextmanager
def _hooked(
    layers: Mapping[str, nn.Module],
    call: Callable[[str, Tensor, Tensor, Tensor], Tensor | None],
) -> Iterator[None]:
    """Call a function with each layer's name, inputs, outputs and low-rank product."""

    def hook(name: str, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        x = inputs[0]
        down, up = trial_matrices(name, x.shape[-1], out.shape[-1])
        product = x.float() @ down.to(x.device).t() @ up.to(x.device).t()
        return call(name, x, out, product)

    hooks = [layer.register_forward_hook(partial(hook, name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
