"""Conversion of GGUF files into models of transformers' classes."""
