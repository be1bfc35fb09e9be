"""Run batches on a model over a paged KV cache. Knows no policy."""
