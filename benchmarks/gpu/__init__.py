"""Test and time the kernels on the GPU at hand: `make gpu`, or `python -m benchmarks.gpu`."""
