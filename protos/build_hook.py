"""Makes the stubs before a wheel or an editable install is built."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):
    """Runs protos/generate.py for wheels and editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Called by hatchling before it collects files."""
        root = Path(self.root)
        if self.target_name == "wheel":
            runpy.run_path(str(root / "protos" / "generate.py"))["generate"](root)
