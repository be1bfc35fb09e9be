"""Linear layers: packed for CPU kernels, fused, with float32 output."""
