"""The kernels that the engine computes with, one package per type of device."""

BACKENDS = {
    "cuda": "octavo.kernels.triton",
    "cpu": "octavo.kernels.cpu",
}
"""The package of each device type, which is a type of torch's; see `octavo.kernels.ops.Backend`.
`--device auto` takes the first that the machine has. "cuda" is every GPU: PyTorch's build for ROCm
calls AMD's so, too."""
