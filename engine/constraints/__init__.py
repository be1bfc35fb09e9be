"""Constrains outputs: compiles grammars in the background, and finds the allowed tokens."""
