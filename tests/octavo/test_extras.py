"""The client and its commands work without the extras' packages."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTORCH_FREE = {"accelerate", "torch", "triton"}

CLIENT = """
import octavo
with octavo.Client({address!r}) as client:
    print(client.generate("a b").text())
"""


def closure(*requirements: str) -> set[str]:
    """Return the normalized names of the distributions that `requirements` install here."""
    names, todo = set(), [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        if requirement.name == "octavo":
            extras = PROJECT["optional-dependencies"]
            todo += [Requirement(line) for extra in requirement.extras for line in extras[extra]]
            continue
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        marker = requirement.marker
        if marker and not any(marker.evaluate(environment) for environment in environments):
            continue
        name = normalized(requirement.name)
        if name not in names or requirement.extras:
            names.add(name)
            todo += [Requirement(line) for line in distribution(name).requires or ()]
    return names


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden(kept: set[str]) -> str:
    """Return Python code that blocks the import of all modules but octavo's and those of `kept`."""
    shown = {*kept, "octavo"}
    modules = [
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier() and not shown & {normalized(owner) for owner in owners}
    ]
    return f"import sys\nsys.modules.update(dict.fromkeys({modules}))\n"


@pytest.fixture(scope="module")
def base():
    """Run Python without the extras."""
    prelude = hidden(closure(*PROJECT["dependencies"]))

    def run(code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", prelude + code]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    return run


def octavo(*arguments: str) -> str:
    return f"sys.argv = {['octavo', *arguments]}\nfrom octavo.cli import app\napp()"


def test_the_base_has_neither_pytorch_nor_transformers():
    base = closure(*PROJECT["dependencies"])
    assert not base & {*PYTORCH_FREE, "transformers", "tokenizers", "numpy"}
    assert closure(*PROJECT["dependencies"], "octavo[router]") >= {"transformers", "starlette"}
    assert not closure("octavo[router,tracing]") & PYTORCH_FREE


def test_the_client_without_extras(base, service):
    done = base(CLIENT.format(address=service.address))
    assert done.stdout == "a b \n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(("generate", "a b"), "a b"), (("status", "--once"), "m "), (("health",), "SERVING")],
)
def test_commands_without_extras(base, service, arguments, shown):
    done = base(octavo(*arguments, "--address", service.address))
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("serve", "--model", "demo"), "all"),
        (("demo",), "all"),
        (("router", "--engine", "localhost:1"), "router"),
        (("engine", "--model", "demo"), "engine"),
        (("bench", "latency"), "bench"),
    ],
)
def test_a_command_without_its_extra_names_it(base, arguments, extra):
    done = base(octavo(*arguments))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install 'octavo[{extra}]'" in done.stderr
    assert not done.stdout


def test_help_lists_every_command_without_extras(base):
    done = base(octavo("--help"))
    for command in ("serve", "router", "engine", "generate", "chat", "demo", "key", "bench"):
        assert command in done.stdout


def test_a_router_needs_no_pytorch():
    kept = closure(*PROJECT["dependencies"], "octavo[router,tracing]")
    code = hidden(kept) + "import octavo.router.server"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
