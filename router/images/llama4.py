"""Llama 4's image processor; transformers has it for torchvision alone."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs


class Llama4Options(ImagesKwargs, total=False):
    """Settings of the processor beside those of all.

    Attributes:
        max_patches: Maximum tiles of an image.
        resize_to_max_canvas: Whether to enlarge an image as far as its tiles allow.
    """

    max_patches: int
    resize_to_max_canvas: bool


class Llama4ImageProcessor(PilBackend):
    """Cuts an image into tiles; if there are several, a view of the whole follows them.

    The image lies undistorted in the upper left corner of the tiles; the rest is black.
    """

    resample = PILImageResampling.BILINEAR
    image_mean = image_std = (0.5, 0.5, 0.5)
    size = {"height": 336, "width": 336}  # noqa: RUF012 - transformers reads it from the class
    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False
    valid_kwargs = Llama4Options

    def _preprocess(  # type: ignore[override]  # as transformers' do
        self,
        images: Sequence[np.ndarray],
        *,
        size: SizeDict,
        max_patches: int,
        resize_to_max_canvas: bool,
        return_tensors: str | None,
        **options: Any,  # noqa: ANN401 - as transformers passes them
    ) -> BatchFeature:
        """Process images, `[3, height, width]` uint8.

        Returns:
            The tiles of all images, `[tiles, 3, side, side]` float32, and the numbers of tiles of
            each image below and beside each other.
        """
        side, resample = size["height"], options["resample"]
        tiles, grids = list[np.ndarray](), list[tuple[int, int]]()
        for image in images:
            grid = _best_grid(image.shape[1:], side, max_patches, largest=resize_to_max_canvas)
            canvas = np.zeros((3, grid[0] * side, grid[1] * side), np.uint8)
            least = math.inf if resize_to_max_canvas else side
            height, width = _fit(image.shape[1:], canvas.shape[1:], least)
            resized = self.resize(image, SizeDict(height=height, width=width), resample)
            canvas[:, :height, :width] = resized
            cut = canvas.reshape(3, grid[0], side, grid[1], side).transpose(1, 3, 0, 2, 4)
            tiles.append(cut.reshape(-1, 3, side, side))
            if len(tiles[-1]) > 1:
                tiles.append(self.resize(image, size, resample)[None])
            grids.append(grid)
        values = _values(options["rescale_factor"], options["image_mean"], options["image_std"])
        joined = np.concatenate(tiles)
        pixels = np.stack([values[channel][joined[:, channel]] for channel in range(3)], 1)
        return BatchFeature({"pixel_values": pixels, "aspect_ratios": grids}, return_tensors)


def _best_grid(shape: Sequence[int], side: int, most: int, *, largest: bool) -> tuple[int, int]:
    """Return the numbers of tiles below and beside each other that fit an image best.

    It is enlarged as little as possible, or reduced as little if that is not possible; among grids
    that do the same the smallest is chosen.

    Args:
        shape: The image's height and width.
        side: A tile's side.
        most: Maximum number of tiles.
        largest: Whether to enlarge the image as much as possible.
    """
    grids = [
        (rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)
    ]
    # In float32, in which transformers finds the grids that do the same.
    scales = np.min(np.array(grids, np.float32) * side / np.array(shape, np.float32), 1)
    larger = scales[scales >= 1]
    best = larger.min() if len(larger) and not largest else scales.max()
    return min(
        (grid for grid, scale in zip(grids, scales, strict=True) if scale == best), key=math.prod
    )


def _fit(shape: Sequence[int], canvas: Sequence[int], least: float) -> tuple[int, int]:
    """Return the height and width of an image on its tiles.

    Args:
        shape: Its own height and width.
        canvas: The height and width of all tiles.
        least: A side up to which it is enlarged.
    """
    # In float32, as transformers computes it, where the tiles are the limit.
    limits: list[Any] = [
        min(max(own, least), np.float32(all_)) for own, all_ in zip(shape, canvas, strict=True)
    ]
    height, width = limits
    across, down = width / shape[1], height / shape[0]
    if across < down:
        height = min(math.floor(shape[0] * across), height)
    else:
        width = min(math.floor(shape[1] * down), width)
    return max(int(height), 1), max(int(width), 1)


def _values(factor: float, mean: Sequence[float], deviation: Sequence[float]) -> np.ndarray:
    """Return `[3, 256]` float32, what each level of each channel becomes.

    Every step is rounded to bfloat16, as when the model was trained.
    """
    levels = _to_bfloat16(np.arange(256, dtype=np.float32) * np.float32(factor))
    columns = (_to_bfloat16(np.array(each, np.float32))[:, None] for each in (mean, deviation))
    shift, scale = columns
    return _to_bfloat16(_to_bfloat16(levels - shift) / scale)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
