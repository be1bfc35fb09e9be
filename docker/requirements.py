"""Prints what an image needs: pyproject.toml's requirements, less what it has no use for.

    python docker/requirements.py router|cpu|cuda

A router only tokenizes: it computes nothing, and PyTorch would be most of its image. An engine on a
CPU has no use for Triton, which is nearly as large.
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRA = "tracing"
UNUSED = {
    "router": {"accelerate", "gguf", "pip", "torch", "triton"},
    "cpu": {"triton"},
    "cuda": set(),
}


def requirements(image: str, pyproject: Path) -> list[str]:
    """Returns the requirements of `image`, a key of `UNUSED`, as pyproject.toml has them."""
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    return [line for line in wanted if _name(line) not in UNUSED[image]]


def _name(requirement: str) -> str:
    """The name that a requirement begins with."""
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path("pyproject.toml"))))
