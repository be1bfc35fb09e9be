"""Drafting: guesses of a sequence's next tokens, which one step of the model verifies.

It knows tokens alone: no blocks, no requests. `engine/scheduling/drafting.py` decides which
sequences of a batch may have a draft and which drafted tokens were right.
"""

from octavo.engine.speculation.method import DraftState, Method
from octavo.engine.speculation.methods import METHODS, make_speculation
from octavo.engine.speculation.speculation import Speculation

__all__ = ["METHODS", "DraftState", "Method", "Speculation", "make_speculation"]
