"""The peers' virtual environments, created once and kept in the cache directory.

pip uses the user's configuration and writes to `install.log` in each environment.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

LOG = "install.log"
DONE = ".installed.json"
"""File with the requirements of a complete environment; written last."""
TAIL = 400

LIST_NEEDS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
name, *without = sys.argv[1:]
for text in importlib.metadata.requires(name) or ():
    need = Requirement(text)
    if need.name not in without and (not need.marker or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""
"""Python program that prints a package's requirements without the named ones."""


class InstallError(Exception):
    """A peer could not be installed. The message is the end of pip's output."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The contents of a virtual environment.

    Attributes:
        name: Name of its directory.
        requirements: Pinned requirements for pip.
        without: Packages that the first requirement needs but its worker never imports; they are
            not installed.
        variables: Variables for packages that are built from source.
        pip_flags: More arguments for `pip install`.
    """

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    pip_flags: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Return a digest of the requirements."""
        return json.dumps([asdict(self), sys.version_info[:3]], sort_keys=True)


def provide(environment: Environment, folder: Path, *, rebuild: bool = False) -> Path:
    """Return an environment's Python; create the environment first if necessary.

    Args:
        environment: Its contents.
        folder: Folder of all environments.
        rebuild: Whether to create it again even if it exists.

    Raises:
        InstallError: Pip failed.
    """
    home = folder / environment.name
    python = home / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{environment.name}.lock"):
        if is_provided(environment, folder) and not rebuild:
            return python
        if home.exists():
            shutil.rmtree(home)
        venv.create(home, with_pip=True)
        _install(environment, home, python)
        (home / DONE).write_text(environment.fingerprint())
    return python


def is_provided(environment: Environment, folder: Path) -> bool:
    """Return whether the folder holds the environment with these requirements."""
    done = folder / environment.name / DONE
    return done.exists() and done.read_text() == environment.fingerprint()


def _install(environment: Environment, home: Path, python: Path) -> None:
    pip = [str(python), "-m", "pip", "install", "--no-input", *environment.pip_flags]
    if not environment.without:
        _run([*pip, *environment.requirements], environment, home)
        return
    main, *others = environment.requirements
    _run([*pip, "--no-deps", main], environment, home)
    command = [str(python), "-c", LIST_NEEDS, main.partition("==")[0], *environment.without]
    needs = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    _run([*pip, *filter(None, needs), *others], environment, home)


def _run(command: list[str], environment: Environment, home: Path) -> None:
    """Run pip and append its output to the log."""
    path = home / LOG
    with path.open("ab") as log:
        variables = {**os.environ, **environment.variables}
        done = subprocess.run(command, stdout=log, stderr=log, env=variables, check=False)
    if done.returncode:
        output = " ".join(path.read_text(errors="replace").split())
        raise InstallError(f"pip ended with {done.returncode}: ...{output[-TAIL:]}")
