"""Runs batches on a model over a paged KV cache, without any policy."""
