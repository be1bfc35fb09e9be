"""The compiled step on a CPU: compiled once in the background, cached on disk.

AOTInductor compiles the whole model ahead of time to a shared library, with weights packed for this
machine. So nothing is traced, guarded or recompiled while requests run, and a warm start reads a
library instead of a model.
"""

from octavo.engine.compilation.artifact import Artifact, CompiledStep, Recipe, locate
from octavo.engine.compilation.background import Compiler

__all__ = ["Artifact", "CompiledStep", "Compiler", "Recipe", "locate"]
