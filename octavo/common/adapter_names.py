"""The names that adapters may have."""

import re

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
ADAPTER_NAMES = (
    "a name has at most 128 letters, digits and . _ / : -, and begins with a letter or digit"
)
"""The same, for people."""
