"""Paged attention for transformers models, as a PyTorch operator."""
