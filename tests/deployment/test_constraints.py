"""constraints.txt has one version of every package that Octavo may install, and no others."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.deployment.composed import DOCKER

ROOT = DOCKER.parent
OWN = {"pip"}  # the virtual environment's
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = [(python, cpu) for python in PYTHONS for cpu in ("x86_64", "aarch64")]

Environment = dict[str, str]


def lines() -> list[str]:
    text = (ROOT / "constraints.txt").read_text()
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def pins(environment: Environment) -> dict[str, Version]:
    """Return each package's version on one kind of machine."""
    found = [Requirement(line) for line in lines()]
    found = [pin for pin in found if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): version(pin) for pin in found}
    assert len(versions) == len(found), "two versions of a package"
    return versions


def version(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def wanted() -> list[Requirement]:
    """Return pyproject.toml's requirements, with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    found = map(Requirement, listed)
    return [requirement for requirement in found if requirement.name not in {"octavo", *OWN}]


def environment_of(python: str, machine: str) -> Environment:
    named = {"python_version": python, "python_full_version": f"{python}.9"}
    return {**default_environment(), **named, "platform_machine": machine, "extra": ""}


def test_a_line_is_a_version_for_any_index_and_build():
    for line in lines():
        pin = Requirement(line)
        assert pin.url is None
        assert not pin.extras
        assert version(pin).local is None, line  # +cpu exists on one index only


@pytest.mark.parametrize(("python", "machine"), MACHINES)
def test_what_the_project_asks_for_has_a_version_in_its_range(python, machine):
    environment = environment_of(python, machine)
    pinned = pins(environment)
    for requirement in wanted():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} has no version: run `make lock`"
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: run `make lock`"


def test_what_the_installed_packages_ask_for_has_a_version_too():
    pinned = pins({**default_environment(), "extra": ""})
    asked, seen = wanted(), set()
    while asked:
        requirement = asked.pop()
        name = canonicalize_name(requirement.name)
        seen_as = (name, frozenset(requirement.extras))
        if seen_as in seen or name in OWN:
            continue
        seen.add(seen_as)
        assert name in pinned, f"{name} has no version: run `make lock`"
        asked += needed_by(requirement)


def needed_by(requirement: Requirement) -> list[Requirement]:
    """Return an installed package's requirements on this machine; none if it is not installed."""
    try:
        listed = requires(requirement.name) or []
    except PackageNotFoundError:
        return []
    return [
        needed
        for needed in map(Requirement, listed)
        if needed.marker is None
        or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras))
    ]
