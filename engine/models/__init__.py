"""Load transformers' decoders and change them for Octavo's kernels."""
