"""The engine's kernels: one package per device type."""

BACKENDS = {
    "cuda": "octavo.kernels.triton",
    "cpu": "octavo.kernels.cpu",
}
"""The package of each PyTorch device type; see `octavo.kernels.backend.Backend`. `--device auto`
takes the first that the machine has. "cuda" also means AMD's GPUs: PyTorch's build for ROCm uses
that name."""
