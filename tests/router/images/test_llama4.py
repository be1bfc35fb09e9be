"""Llama 4's images become what transformers' processor makes of them, which needs torchvision."""

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.router.images.llama4 import Llama4ImageProcessor

SIDE = 336
FITTED = [
    ((1, 1), 16, False, (1, 1), (336, 336)),
    ((336, 336), 16, False, (1, 1), (336, 336)),
    ((337, 336), 16, False, (2, 1), (337, 336)),
    ((500, 700), 16, False, (2, 3), (500, 700)),
    ((200, 300), 16, False, (1, 1), (224, 336)),
    ((90, 9), 4, False, (1, 1), (336, 33)),
    ((9, 90), 4, False, (1, 1), (33, 336)),
    ((3000, 2000), 16, False, (5, 3), (1512, 1008)),
    ((40, 2000), 16, False, (1, 6), (40, 2000)),
    ((15, 25), 16, True, (3, 5), (1008, 1679)),
    ((100, 100), 16, True, (4, 4), (1344, 1344)),
    ((336, 672), 3, True, (1, 2), (336, 672)),
    ((5, 8), 15, True, (3, 5), (1008, 1612)),
]
"""Sizes of images, settings, and the tiles and the size on them by transformers' functions."""


@pytest.mark.parametrize(("shape", "most", "largest", "grid", "fitted"), FITTED)
def test_an_image_lies_on_the_tiles_that_fit_it_best(shape, most, largest, grid, fitted):
    processor = Llama4ImageProcessor(max_patches=most, resize_to_max_canvas=largest)
    white = Image.new("RGB", shape[::-1], (255, 255, 255))
    made = processor(white, return_tensors="np")
    assert made["aspect_ratios"].tolist() == [list(grid)]
    count = grid[0] * grid[1]
    pixels = made["pixel_values"]
    assert pixels.shape == (count + (count > 1), 3, SIDE, SIDE)
    canvas = pixels[:count].reshape(*grid, 3, SIDE, SIDE).transpose(2, 0, 3, 1, 4)
    canvas = canvas.reshape(3, grid[0] * SIDE, grid[1] * SIDE)
    assert (canvas[:, : fitted[0], : fitted[1]] == 1).all()
    assert (canvas[:, fitted[0] :] == -1).all()
    assert (canvas[:, :, fitted[1] :] == -1).all()
    assert count == 1 or (pixels[-1] == 1).all()  # the view of the whole


def test_pixels_are_rounded_to_bfloat16_in_every_step():
    mean, deviation = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    processor = Llama4ImageProcessor(
        size={"height": 16, "width": 16}, image_mean=mean, image_std=deviation
    )
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    made = processor(Image.fromarray(levels), return_tensors="np")["pixel_values"]
    means, deviations = (
        torch.tensor(each, dtype=torch.bfloat16)[:, None, None] for each in (mean, deviation)
    )
    scaled = torch.from_numpy(levels).permute(2, 0, 1).to(torch.bfloat16) * (1 / 255)
    expected = ((scaled - means) / deviations).float().numpy()
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made[0], expected)
