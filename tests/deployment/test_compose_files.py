"""The compose files are valid for Compose 1 and 2, and consistent."""

import os
import re
import shutil
import subprocess

import pytest
import yaml
from compose_spec import PyCompose, parse_duration

from octavo.common.settings import ENV_PREFIX
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from tests.deployment.composed import DOCKER, interpolated, process, services

FILES = sorted(path.name for path in DOCKER.glob("compose*.yaml"))
OURS = {"router": RouterSettings, "engine": EngineSettings}


@pytest.mark.parametrize("name", FILES)
def test_it_is_of_the_specification(name):
    PyCompose.from_yaml(interpolated(name))


@pytest.mark.parametrize("name", FILES)
def test_docker_compose_takes_it_over_the_first(name, tmp_path):
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose (Debian: apt-get install docker-compose)")
    for file in FILES:  # version 1, Debian's, does not support project names
        text = re.sub(r"^name: .*\n", "", (DOCKER / file).read_text(), flags=re.MULTILINE)
        (tmp_path / file).write_text(text)
    over = ["-f", name] if name != "compose.yaml" else []
    done = subprocess.run(
        ["docker-compose", "-f", "compose.yaml", *over, "config"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)["services"]
    if name == "compose.gpu.yaml":
        engines = [service for name, service in merged.items() if name.startswith("engine")]
        assert len({str(service["deploy"]["resources"]) for service in engines}) == len(engines)
        for service in engines:
            assert service["image"] == "octavo-engine:cuda"
            assert service["networks"]["default"]["aliases"] == ["engine"]
            assert service["environment"]["OCTAVO_MODEL"] == "demo"
            assert service["environment"]["OCTAVO_CACHE_MEMORY"] == ""


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours(name):
    service = services()[name]
    drain = float(service["environment"]["OCTAVO_DRAIN_TIMEOUT"])
    assert parse_duration(service["stop_grace_period"]) > drain + 5
    assert service["restart"] == "unless-stopped"
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert service["read_only"]
    assert service["init"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    fields = OURS[name].model_fields
    known = {f"{ENV_PREFIX}{field.upper()}" for field in fields} | {"OCTAVO_ADDRESS"}
    _, environment = process(service)
    assert {key for key in environment if key.startswith(ENV_PREFIX)} <= known


def test_nothing_is_published_beyond_this_machine():
    for service in services().values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_what_is_mounted_is_there():
    for service in services().values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).is_dir()
