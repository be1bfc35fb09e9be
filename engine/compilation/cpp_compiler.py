"""Tells whether there is a C++ compiler, which decides how a step is made for a CPU."""

import os
import shutil


def has_compiler() -> bool:
    """Return whether there is the C++ compiler that Inductor calls: $CXX, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None
