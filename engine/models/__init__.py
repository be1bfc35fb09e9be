"""Loads transformers' decoders and adapts them to Octavo's kernels."""
