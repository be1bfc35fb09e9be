"""A process without PyTorch.

transformers imports PyTorch wherever it finds it. A router needs only tokenizers of it, for which
that takes seven seconds of a core and 340 MB of memory more.
"""

import os
import sys
from types import ModuleType
from typing import cast


def keep_torch_out() -> None:
    """Refuse later imports of PyTorch in this process, unless it is imported already.

    That is what None in `sys.modules` is for (Python's language reference, section 5.3.1). Packages
    that work with PyTorch and without find none.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch
    sys.modules.setdefault("torch", cast("ModuleType", None))
