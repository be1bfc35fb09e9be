"""Captures a model's step as a graph of operators, for any number of tokens."""

import torch
from torch.export import Dim, ExportedProgram

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.models.forward import EagerForward

MAX_TOKENS = 1 << 20
"""Upper bound on the number of tokens for the compiler; no step comes near it."""
EXAMPLE_TOKENS, EXAMPLE_ROWS = 256, 48
"""The sizes of a busy step; the compiler decides by them where to use threads."""


def example(
    device: torch.device, tokens: int = EXAMPLE_TOKENS, rows: int = EXAMPLE_ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs for a step; by default for a busy step."""
    token_ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
    return token_ids, token_ids.clone(), torch.arange(rows, device=device)


@torch.no_grad()  # otherwise no_grad parts of models become separate graphs
def capture(forward: EagerForward, device: torch.device) -> ExportedProgram:
    """Capture a step for any number of tokens and rows from 2; the compiler makes 1 a constant.

    Args:
        forward: The step.
        device: The model's device.

    Raises:
        Exception: Torch cannot capture the model.
    """
    tokens, rows = (Dim(name, min=2, max=MAX_TOKENS) for name in ("tokens", "rows"))
    with attending(DryRun()):  # otherwise stateful modules call transformers' functions
        captured = torch.export.export(
            forward,
            example(device),
            dynamic_shapes=({1: tokens}, {1: tokens}, {0: rows}),
            strict=False,
        )
    for node in captured.graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # noqa: SLF001
            captured.graph.erase_node(node)
    captured.graph_module.recompile()
    return captured
