"""Runs batches on a transformers model over a paged KV cache. Knows no policy."""
