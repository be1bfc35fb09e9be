"""What the GPU at hand makes of the kernels: `make gpu`, or `python -m benchmarks.gpu`."""
