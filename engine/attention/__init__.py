"""Paged attention as transformers and PyTorch call it."""
