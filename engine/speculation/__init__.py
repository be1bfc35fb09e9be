"""Drafting: guesses of a sequence's next tokens, which one step of the model verifies.

It knows only tokens: no blocks, no requests. `engine/scheduling/drafting.py` decides which
sequences of a batch get a draft, and which drafted tokens were right.
"""
