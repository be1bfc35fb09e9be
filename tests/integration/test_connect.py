"""The programs of docs/connect.md run as they stand, but for the server's address."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CONNECT = (Path(__file__).parents[2] / "docs" / "connect.md").read_text()
PROGRAMS = dict(re.findall(r"^## ([^\n]*)\n\n```py\n(.*?)```", CONNECT, re.DOTALL | re.MULTILINE))
ADDRESS = "http://localhost:8000"


def test_there_are_programs():
    assert PROGRAMS
    assert all(ADDRESS in program for program in PROGRAMS.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(served, name):
    for package in re.findall(r"^(?:import|from) (\w+)", PROGRAMS[name], re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}, which may be anywhere on PYTHONPATH")
    program = PROGRAMS[name].replace(ADDRESS, served.http)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip()
