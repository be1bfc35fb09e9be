"""The compiled step on CPU: made once in the background, kept on disk, loaded at once.

The model is exported whole and compiled ahead of time to a shared library
(AOTInductor), with its weights packed for this machine's matrix products. So a
service never compiles while it serves: there is nothing to trace, guard or
recompile, and a warm start reads a library instead of a model.
"""

from octavo.engine.compilation.artifact import Artifact, CompiledStep, Recipe, locate
from octavo.engine.compilation.background import Compiler

__all__ = ["Artifact", "CompiledStep", "Compiler", "Recipe", "locate"]
