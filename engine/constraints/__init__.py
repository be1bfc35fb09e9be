"""Constrain outputs: grammars compiled in the background, and the tokens that they allow."""
