"""Build hook: generate the stubs, and put the parts into the wheel under `octavo`."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("engine", "kernels", "router")


class StubsHook(BuildHookInterface):
    """Prepares wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the stubs; map `engine/` to `octavo/engine/` and so on, except if editable.

        An editable install finds the parts through the links in `octavo/`.
        """
        root = Path(self.root)
        if self.target_name != "wheel":
            return
        runpy.run_path(str(root / "protos" / "generate.py"))["generate"](root)
        if version != "editable":
            build_data["force_include"] |= {part: f"octavo/{part}" for part in PARTS}
