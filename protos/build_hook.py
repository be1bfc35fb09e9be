"""Build hook: generate the stubs, put the parts under `octavo`, and compile the CPU kernels."""

import os
import platform
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("engine", "kernels", "router")
PURE = "OCTAVO_PURE_WHEEL"
"""Environment variable: 1 for a wheel for any machine, without compiled kernels."""


class BuildHook(BuildHookInterface):
    """Prepares wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs; for a wheel, add the parts and the compiled kernels.

        A wheel has `engine/` as `octavo/engine/`, and so on. An editable install finds the parts
        through the links in `octavo/`, and compiles the kernels for its own machine.
        """
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        runpy.run_path(str(root / "protos" / "generate.py"))["generate"](root)
        if version == "editable":
            return
        build_data["force_include"] |= {part: f"octavo/{part}" for part in PARTS}
        if os.environ.get(PURE) != "1":
            self._add_kernels(root, build_data)

    def _add_kernels(self, root: Path, build_data: dict[str, Any]) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        prebuild = runpy.run_path(str(root / "kernels" / "cpu" / "prebuild.py"))["prebuild"]
        libraries = prebuild(Path(self._scratch.name))
        if not libraries:
            self.app.display_warning("no g++: the wheel has no CPU kernels")
            return
        build_data["force_include"] |= {
            str(library): f"octavo/kernels/cpu/prebuilt/{library.name}" for library in libraries
        }
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(libraries)}"

    def finalize(self, *_: object) -> None:
        """Remove the compiled libraries, which the wheel now has."""
        if scratch := getattr(self, "_scratch", None):
            scratch.cleanup()


def _platform(libraries: list[Path]) -> str:
    """Return the tag of systems with the C library that compiled code needs (PEP 600)."""
    needed = (re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()) for library in libraries)
    minor = max(int(number) for numbers in needed for number in numbers)
    return f"manylinux_2_{max(minor, 17)}_{platform.machine()}"
