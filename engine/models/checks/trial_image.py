"""The smallest images that vision encoders take, with random pixels."""

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from octavo.engine.models.vision import ROTATED

ROWS, COLUMNS = 2, 3
"""Tokens of an image of any size, so that its rows are no columns."""


def trial_image(config: PreTrainedConfig) -> dict[str, np.ndarray]:
    """Return the tensors of one image as the processor of a model would make them.

    Args:
        config: The model's config.
    """
    vision: Any = getattr(config, "vision_config", None)
    if config.model_type in ROTATED:
        return _in_patches(vision)
    if vision.model_type == "pixtral":
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        size = ROWS * side, COLUMNS * side
        return {"pixel_values": _pixels(1, 3, *size), "image_sizes": np.array([size])}
    side = vision.image_size
    return IN_TILES.get(config.model_type, _alone)(side if isinstance(side, int) else side[0])


def _in_patches(vision: Any) -> dict[str, np.ndarray]:  # noqa: ANN401
    """Return an image in rows of patches."""
    merge = vision.spatial_merge_size
    rows, columns = ROWS * merge, COLUMNS * merge
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    elements = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = np.array([[1, rows, columns]])
    return {"pixel_values": _pixels(rows * columns, elements), "image_grid_thw": grid}


def _alone(side: int) -> dict[str, np.ndarray]:
    return {"pixel_values": _pixels(1, 3, side, side)}


def _idefics(side: int) -> dict[str, np.ndarray]:
    return {"pixel_values": _pixels(1, 1, 3, side, side)}


def _tiles(side: int) -> dict[str, np.ndarray]:
    return {"pixel_values": _pixels(2, 3, side, side)}


def _llava(side: int) -> dict[str, np.ndarray]:
    """Return an image of two tiles and a whole view."""
    return {
        "pixel_values": _pixels(1, 3, 3, side, side),
        "image_sizes": np.array([[side, 2 * side]]),
    }


IN_TILES: dict[str, Callable[[int], dict[str, np.ndarray]]] = {
    "idefics3": _idefics,
    "llama4": _tiles,
    "llava_next": _llava,
    "llava_onevision": _llava,
    "smolvlm": _idefics,
}
"""Functions of a tile's side, by the model's type, if an image has tiles."""


def _pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)
