"""The package as users install it: built from an sdist, in fresh environments. Needs a network."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.cli.local_server import local_server
from octavo.common.models.resolve import DEMO
from octavo.kernels.cpu.instruction_sets import INSTRUCTION_SETS, supported_sets
from octavo.kernels.cpu_target import cpu_features

ROOT = Path(__file__).parents[2]
BOTH = """
import kernels, octavo.kernels
from kernels import get_kernel
assert callable(get_kernel)
assert octavo.kernels.__name__ == "octavo.kernels"
assert not kernels.__file__.startswith(octavo.kernels.__path__[0])
print(kernels.__file__, octavo.kernels.__file__)
"""
KERNELS = """
from pathlib import Path
import octavo, torch
from octavo.kernels import cpu
x, w = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
layer = cpu.linear.pack(w), cpu.linear.pad_outputs(torch.zeros(32))
y = torch.ops.octavo_cpu.packed_linear_wide(x, 32, *layer, -1)
torch.testing.assert_close(y.float(), x.float() @ w.float().T, rtol=0.01, atol=0.05)
print(Path(octavo.__file__).parent, cpu.path, cpu.warning)
"""
CLIENT = """
import octavo, sys
with octavo.Client(sys.argv[1]) as client:
    print(client.generate("1, 2, 3, 4,", max_tokens=4, temperature=0).text())
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Environment:
    """A virtual environment."""

    def __init__(self, directory: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        self.binaries = directory / "bin"
        (self.site_packages,) = directory.glob("lib/python*/site-packages")

    def run(self, program: str, *arguments: str | Path) -> str:
        """Return the output of a program in the environment."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [self.binaries / program, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *packages: str | Path) -> None:
        self.run("pip", "install", "--quiet", *packages)

    def packages(self) -> set[str]:
        return {entry["name"] for entry in json.loads(self.run("pip", "list", "--format=json"))}

    def size(self) -> int:
        """Return the installed bytes besides pip and setuptools."""
        tools = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
        files = (f for f in self.site_packages.rglob("*") if f.is_file())
        kept = (f for f in files if not str(f.relative_to(self.site_packages)).startswith(tools))
        return sum(file.stat().st_size for file in kept)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the sdist as an index would serve it."""
    directory = tmp_path_factory.mktemp("build")
    builder = Environment(directory / "venv")
    builder.install("hatchling")
    command = [builder.binaries / "python", "-m", "hatchling", "build", "-t", "sdist"]
    subprocess.run([*command, "-d", directory], cwd=ROOT, check=True)
    (sdist,) = directory.glob("*.tar.gz")
    builder.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, sdist)
    (made,) = directory.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def client(wheel, tmp_path_factory):
    """An environment with the package and no extras."""
    environment = Environment(tmp_path_factory.mktemp("client"))
    environment.install(wheel)
    return environment


def test_the_wheel_has_one_import_root(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"octavo"}
    expected = ("engine/core/step.py", "kernels/ops.py", "router/server.py", "v1/engine_pb2.py")
    assert {f"octavo/{name}" for name in expected} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_wheel_carries_kernels_for_every_instruction_set(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    carried = {Path(name).stem for name in names if "/kernels/cpu/prebuilt/" in name}
    assert carried == {isa.name for isa in INSTRUCTION_SETS[platform.machine()]}
    assert re.search(rf"-py3-none-manylinux_2_\d+_{platform.machine()}\.whl$", wheel.name)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_machine_without_a_compiler_has_kernels(wheel, tmp_path):
    """The wheel's kernels are loaded; the first start compiles none."""
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", installed, wheel], check=True)
    environment = {
        "PYTHONPATH": str(installed),
        "PATH": str(tmp_path),  # nothing exists
        "OCTAVO_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", KERNELS],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    best = supported_sets(platform.machine(), cpu_features())[0].name
    assert done.stdout.split() == [str(installed / "octavo"), best, "None"]
    assert not (tmp_path / "cache").exists()


def test_the_client_alone(client, capsys):
    assert not client.packages() & {"torch", "transformers", "tokenizers", "numpy", "triton"}
    size = client.size() / 2**20
    with capsys.disabled():
        print(f"\npip install octavo: {len(client.packages())} packages, {size:.1f} MiB")
    assert size < 64
    with local_server(DEMO, "--num-blocks", "64", "--max-model-len", "1024") as address:
        answer = ("--raw", "-t", "0", "--max-tokens", "4", "--address", address)
        assert "5" in client.run("octavo", "generate", "1, 2, 3, 4,", *answer)
        assert "serving" in client.run("octavo", "status", "--once", "--address", address)
        assert "SERVING" in client.run("octavo", "health", "--address", address)
        assert "5" in client.run("python", "-c", CLIENT, address)


@pytest.mark.parametrize("octavo_first", [True, False])
def test_beside_the_package_kernels(octavo_first, wheel, tmp_path):
    environment = Environment(tmp_path)
    for package in (wheel, "kernels") if octavo_first else ("kernels", wheel):
        environment.install(package)
    environment.run("python", "-c", BOTH)
    assert "octavo" in environment.run("octavo", "--version")
