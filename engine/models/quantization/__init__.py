"""Quantization of linear layers at load: one scheme per file.

To add a scheme, add a module here with a `Scheme` (see base.py) named `SCHEME`, and a line below.
Nothing here imports PyTorch, so that commands can list the schemes quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from octavo.engine.models.quantization.base import Scheme

SCHEMES = {
    "int8": "8-bit weights, and activations on CPUs",
    "int4": "4-bit weights",
    "fp8": "8-bit floats, on GPUs alone",
}
"""Descriptions of the schemes by name, which is also the module's name."""


def schemes_for(device: "torch.device") -> list[str]:
    """Return the names of the schemes that a device has kernels for."""
    schemes = ((name, find_scheme(name)) for name in SCHEMES)
    return [
        name
        for name, scheme in schemes
        if scheme is not None and (device.type != "cpu" or scheme.on_cpus)
    ]


def find_scheme(name: str) -> "Scheme | None":
    """Return a scheme by its name, or None for `none`.

    Raises:
        KeyError: There is no such scheme.
    """
    if name == "none":
        return None
    if name not in SCHEMES:
        raise KeyError(f"no quantization scheme {name!r}: use none, {', '.join(SCHEMES)}")
    scheme: Scheme = import_module(f"{__name__}.{name}").SCHEME
    return scheme
