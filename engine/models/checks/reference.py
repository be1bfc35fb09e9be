"""The results of transformers' own forward pass for some random tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.checks.widened import is_narrow, is_small, widened

if TYPE_CHECKING:  # slow: imports transformers
    from octavo.engine.models.checks.module_routing import ModuleRouting

TOKENS = 40
ROWS = (*range(0, TOKENS - 2, 2), TOKENS - 1)
"""Number of tokens whose logits are compared. Rounding changes a few rows far more than the others,
so a quantile of their errors needs many rows."""
PASSES = 4
"""Number of 16-bit forward passes that measure the rounding error. In some models the first row has
the largest error, and it differs by a factor of two between passes."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The logits of transformers' forward pass in float32.

    Attributes:
        tokens: `[TOKENS]` int64 token ids, on the CPU.
        logits: `[len(ROWS), vocab_size]` float32, on the CPU.
        rounding: `[passes * len(ROWS)]` float32, the errors of transformers' logits in the model's
            own dtype, with the same choices; zeros in float32, and before they are measured.
        choices: Choices of each expert layer, in order.
        free: Whether the logits are from a checked step that chose its experts itself.
        passed: The settings with which a step has passed all checks against it.
    """

    tokens: Tensor
    logits: Tensor
    rounding: Tensor
    choices: tuple[Choice, ...] = ()
    free: bool = False
    passed: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = {
            "tokens": self.tokens,
            "logits": self.logits,
            "rounding": self.rounding,
            "free": torch.tensor(self.free),
        }
        for layer, choice in enumerate(self.choices):
            for name, values in choice._asdict().items():
                tensors[f"{name}.{layer}"] = values
        save_file(tensors, path, {"passed": json.dumps(self.passed)})

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read a file that `save` wrote.

        Raises:
            OSError: There is no such file.
        """
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            passed = tuple(json.loads(file.metadata()["passed"]))
        choices = []
        for layer in count():
            if f"experts.{layer}" not in tensors:
                break
            choices.append(Choice(*(tensors[f"{name}.{layer}"] for name in Choice._fields)))
        tokens, logits, rounding = (tensors[name] for name in ("tokens", "logits", "rounding"))
        return cls(tokens, logits, rounding, tuple(choices), bool(tensors["free"]), passed)


@torch.inference_mode()
def reference(
    model: nn.Module,
    shape: ModelShape,
    routing: "ModuleRouting",
    device: torch.device | None = None,
) -> Reference:
    """Run transformers' forward pass.

    It does not measure a large model's rounding errors, which takes long; see `with_rounding`.

    Args:
        model: A transformers model with transformers' own attention.
        shape: Its dimensions.
        routing: The routing of its expert layers.
        device: The device to run on. Default: that of its weights.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        shape.vocab_size, (min(TOKENS, shape.max_position),), generator=generator
    )
    with widened(model), routing.recorded() as recorded:
        logits = forward_logits(model, tokens, device)
    exact = Reference(tokens, logits, torch.zeros(len(logits)), tuple(recorded))
    if is_narrow(model) and is_small(model):
        return with_rounding(exact, model, routing, device)
    return exact


@torch.inference_mode()
def with_rounding(
    expected: Reference,
    model: nn.Module,
    routing: "ModuleRouting",
    device: torch.device | None = None,
    *,
    passes: int = PASSES,
    first: int = 0,
) -> Reference:
    """Add the errors of transformers' forward passes in the model's own dtype.

    All but the first pass perturb embeddings at random, so that all results are rounded
    differently.

    Args:
        expected: The results in float32.
        model: See `reference`.
        routing: See `reference`.
        device: See `reference`.
        passes: The number of passes.
        first: The number of the first pass.
    """
    errors = [expected.rounding] if first else []
    for number in range(first, first + passes):
        with routing.forced(expected.choices, 0), _rounded_again(model, number):
            rounded = forward_logits(model, expected.tokens, device)
        errors.append(row_errors(rounded, expected.logits))
    return replace(expected, rounding=torch.cat(errors))


@contextmanager
def _rounded_again(model: Any, number: int) -> Iterator[None]:  # noqa: ANN401
    """Within the context, change a model's embeddings at random by up to half an ulp.

    Args:
        model: The model.
        number: Seed of the random numbers; 0 for none.
    """

    def move(_: nn.Module, __: object, embeddings: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        signs = torch.rand(embeddings.shape, generator=generator).to(embeddings.device) * 2 - 1
        half = torch.finfo(embeddings.dtype).eps / 2
        return (embeddings.float() * (1 + half * signs)).to(embeddings.dtype)

    hook = model.get_input_embeddings().register_forward_hook(move) if number else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def forward_logits(model: nn.Module, tokens: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the compared rows of a model's logits as `reference` does, in float32 on the CPU."""
    device = device or next(model.parameters()).device
    logits: Tensor = model(input_ids=tokens[None].to(device), use_cache=False).logits[0]
    return logits[compared_rows(len(tokens))].float().cpu().contiguous()


def compared_rows(count: int) -> list[int]:
    """Return the compared rows among the first `count` tokens."""
    return [row for row in ROWS if row < count]


def row_errors(computed: Tensor, expected: Tensor) -> Tensor:
    """Return each row's error.

    It is the root mean square of the differences of a row's logits, divided by the row's standard
    deviation.

    Args:
        computed: `[rows, vocab_size]` float32.
        expected: `[rows, vocab_size]` float32.

    Returns:
        `[rows]`.
    """
    scale = (expected - expected.mean(1, keepdim=True)).norm(dim=1).clamp_min(1e-12)
    errors: Tensor = (computed - expected).norm(dim=1) / scale
    return errors
