"""Broadcasts the image embeddings of a step: rank 0 alone runs the vision encoder."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.engine.execution.inputs import StepImages, to_inputs
from octavo.engine.execution.step_arrays import StepArrays
from octavo.engine.parallel.world import World
from octavo.kernels.metadata import AttentionShape


def share_images(world: World, images: StepImages, embeddings: Tensor) -> None:
    """Broadcast a step's image embeddings and the places of their tokens to the other ranks.

    Args:
        world: The ranks.
        images: The tokens that stand for images.
        embeddings: Their embeddings; see `EagerForward.with_images`.
    """
    split, positions = images.split, images.positions
    arrays = () if split is None else (split.query_starts, split.query_lens, split.seq_lens)
    tables = () if split is None else split.tables
    world.share(
        [
            images.rows,
            torch.empty(0, dtype=torch.int64) if positions is None else positions,
            embeddings,
            *map(torch.from_numpy, (*arrays, *tables)),
        ]
    )


def receive_images(
    world: World,
    arrays: StepArrays,
    device: torch.device,
    shapes: Sequence[AttentionShape | None],
) -> tuple[StepImages, Tensor]:
    """Return the places and the embeddings that rank 0 broadcasts; see `share_images`.

    Args:
        world: The ranks.
        arrays: The step's arrays.
        device: The cache's device.
        shapes: Shape of each layer group's attention; None for states.
    """
    rows, positions, embeddings, *parts = world.share(None)
    groups = None
    if parts:
        starts, lengths, seen, *tables = (part.numpy() for part in parts)
        split = replace(
            arrays, query_starts=starts, query_lens=lengths, seq_lens=seen, tables=tables
        )
        groups = to_inputs(split, device=device, shapes=shapes).groups
    images = StepImages(
        rows.to(device), [], positions.to(device) if len(positions) else None, groups
    )
    return images, embeddings.to(device)
