"""Tokenization, chat templates and detokenization."""
