"""Quantization of linear layers at load."""
