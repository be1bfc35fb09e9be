"""The version of a tree that is installed, and of one that is not."""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_copy_of_the_tree_runs_without_being_installed(tmp_path):
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "octavo" not in path.name and path.suffix != ".pth":
            (tmp_path / path.name).symlink_to(path)
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    told = subprocess.run(
        [sys.executable, "-S", "-m", "octavo", "--version"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert told.split() == ["octavo", project["version"]]
