"""The official JSON-Schema-Test-Suite, as the source package of `jsonschema` has it."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

PACKAGE = "jsonschema==4.26.0"


class SuiteMissingError(Exception):
    """The package index cannot be reached."""


def download_suite(directory: Path) -> list[dict[str, Any]]:
    """Return the groups of draft 2020-12: a schema each, and documents that keep to it or do not.

    Args:
        directory: An empty directory for the package.

    Raises:
        SuiteMissingError: It cannot be downloaded.
    """
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run([*download, "-d", directory, PACKAGE], check=False)
    if done.returncode:
        raise SuiteMissingError(f"pip cannot download {PACKAGE}")
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    groups: list[dict[str, Any]] = []
    for file in sorted(directory.glob("*/json/tests/draft2020-12/*.json")):
        groups += json.loads(file.read_text())
    return groups
