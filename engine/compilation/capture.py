"""Captures a model's step as a graph of operators, for any number of tokens."""

import torch
from torch.export import Dim, ExportedProgram

from octavo.engine.models.step import EagerStep

MOST_TOKENS = 1 << 20
"""An upper bound that the compiler wants for the number of tokens; no step comes near."""
EXAMPLE_TOKENS, EXAMPLE_ROWS = 256, 48
"""By these the compiler decides what is worth several threads: a busy step's."""


def example(
    device: torch.device, tokens: int = EXAMPLE_TOKENS, rows: int = EXAMPLE_ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of a step; of a busy one, if it is not said how many."""
    token_ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
    return token_ids, token_ids.clone(), torch.arange(rows, device=device)


@torch.no_grad()  # with gradients on, what models do without them would be graphs of their own
def capture(step: EagerStep, device: torch.device) -> ExportedProgram:
    """Captures a step.

    Sizes of 1 are left out, for the compiler would make constants of them.

    Args:
        step: of a model.
        device: where it is.

    Raises:
        Exception: whatever torch raises of a model that does not only compute with tensors.
    """
    tokens, rows = (Dim(name, min=2, max=MOST_TOKENS) for name in ("tokens", "rows"))
    captured = torch.export.export(
        step,
        example(device),
        dynamic_shapes=({1: tokens}, {1: tokens}, {0: rows}),
        strict=False,
    )
    for node in captured.graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # noqa: SLF001
            captured.graph.erase_node(node)
    captured.graph_module.recompile()
    return captured
