"""Converts GGUF files to models of transformers' classes."""
