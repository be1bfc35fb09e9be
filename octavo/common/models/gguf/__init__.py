"""Reads GGUF files, without PyTorch: fields, tokenizers and the locations of tensors."""
