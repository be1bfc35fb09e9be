"""Chooses the device that runs the model."""

import torch

from octavo.common.models.errors import UnsupportedModelError
from octavo.kernels import BACKENDS


def choose_device(name: str) -> torch.device:
    """Return the device for `auto` or a backend's name.

    Raises:
        UnsupportedModelError: This machine has no such device.
    """
    available = [kind for kind in BACKENDS if torch.get_device_module(kind).is_available()]
    if name != "auto" and name not in available:
        raise UnsupportedModelError(
            f"--device {name}: torch finds no such device; use {' or '.join(available)}"
        )
    return torch.device(available[0] if name == "auto" else name)
