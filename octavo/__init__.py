"""Octavo: a gRPC service for large language models, built on PagedAttention."""
