"""What is released: one version, and the Pythons that the package says it has."""

import re
import tomllib

import yaml

from tests.deployment.composed import DOCKER
from tests.deployment.test_constraints import PYTHONS

ROOT = DOCKER.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_package_and_chart_have_one_version():
    chart = yaml.safe_load((ROOT / "deploy" / "octavo" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]


def test_a_release_is_tested_on_every_python_that_the_package_is_for():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == list(PYTHONS)
    named = [re.fullmatch(r".* :: (3\.\d+)", each) for each in PROJECT["classifiers"]]
    assert [match[1] for match in named if match] == list(PYTHONS)
    after = f"3.{int(PYTHONS[-1].split('.')[1]) + 1}"
    assert PROJECT["requires-python"] == f">={PYTHONS[0]},<{after}"


def test_nothing_is_published_before_the_tests():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        return set(needs).union(*map(before, needs))

    publishing = {name for name, job in jobs.items() if "write" in str(job.get("permissions"))}
    assert publishing == {"pypi", "images", "chart"}
    assert all({"test", "wheel"} <= before(name) for name in publishing)
