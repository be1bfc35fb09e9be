"""Attention and cache kernels over a paged KV cache."""
