"""The version of this package."""

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def own_version() -> str:
    """Return Octavo's version; of a tree that is not installed, as pyproject.toml names it."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
        return str(tomllib.loads(text)["project"]["version"])
