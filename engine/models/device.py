"""Chooses the device that runs the model."""

import os
from pathlib import Path

import torch

from octavo.common.models.errors import UnsupportedModelError, first_line
from octavo.kernels import BACKENDS

DEVICES = Path("/dev")
"""Where Linux shows NVIDIA's GPUs, as nvidia0, nvidia1, ..., whatever the driver's version."""


def choose_device(name: str) -> torch.device:
    """Return the device for `auto` or a backend's name.

    Raises:
        UnsupportedModelError: This machine has no such device, or has a GPU that torch cannot use.
    """
    available = [kind for kind in BACKENDS if torch.get_device_module(kind).is_available()]
    if name in {"auto", "cuda"} and "cuda" not in available:
        _check_driver()
    if name != "auto" and name not in available:
        raise UnsupportedModelError(
            f"--device {name}: torch finds no such device; use {' or '.join(available)}"
        )
    return torch.device(available[0] if name == "auto" else name)


def _check_driver() -> None:
    """Refuse a GPU that torch is built for but cannot use, as with a driver that is too old.

    A user who hides all GPUs from this process asks for a CPU.

    Raises:
        UnsupportedModelError: There is such a GPU; the message has torch's own error.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    if hidden or not torch.version.cuda or not any(DEVICES.glob("nvidia[0-9]*")):
        return
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} cannot use it:"
            f" {first_line(error)}. Mend that, or set --device cpu"
        ) from error
