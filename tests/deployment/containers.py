"""Runs docker/compose.yaml in real containers: images on a Debian base that is made here.

Nothing is pulled. Prometheus is Debian's, and images install packages from where pip does on
this machine.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.common.models import demo
from tests.deployment.composed import DOCKER
from tests.integration.harness import wait_until

PROJECT = "octavo-test"
ADDRESS = "127.0.0.41"
"""The router's ports are published here: a developer's own router may have those of 127.0.0.1."""
BASE, BUILD, PROMETHEUS = (f"{PROJECT}-{name}" for name in ("base", "build", "prometheus"))
DEBIAN = "bookworm"
ANY_USER = "54321:0"
"""A user that no image has, with group 0, as OpenShift gives one to a container."""
OTHER_USER = "54321:54321"
"""The same, with a group that no image has."""

Inspected = dict[str, Any]


def run(*command: str | Path, **options: Any) -> str:
    """Run a command and return its output; fail with its errors if it fails."""
    options = {"timeout": 1800, **options}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@contextmanager
def daemon(directory: Path) -> Iterator[None]:
    """Use Docker's daemon, or run one in a directory meanwhile; skip the tests without root."""
    wanted = ("docker", "docker-compose", "mmdebstrap")
    missing = [program for program in wanted if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's docker.io, {', '.join(wanted[1:])}; no {missing}")
    if _answers():
        yield
        return
    if shutil.which("dockerd") is None:
        pytest.skip("needs dockerd (Debian: apt-get install docker.io)")
    socket = f"unix://{directory}/socket"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    flags = [f"--{flag}={directory / name}" for flag, name in places.items()]
    with (directory / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(["dockerd", "-H", socket, *flags], stdout=log, stderr=log)
        patch.setenv("DOCKER_HOST", socket)
        try:
            wait_until(_answers, 60, "dockerd")
            yield
        finally:
            process.terminate()
            process.wait(60)
            left = (
                directory / "exec" / "netns" / "default"
            )  # after a container in the host's network
            if os.path.ismount(left):
                run("umount", left)
            shutil.rmtree(directory / "data")


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def make_base_images(directory: Path) -> None:
    """Make Debian with Python; the same with pip's configuration, and with Prometheus.

    A daemon that was there before keeps them for the next time.
    """
    if run("docker", "images", "--quiet", PROMETHEUS):
        return
    tar = directory / "base.tar"
    packages = "python3,python3-venv,ca-certificates"
    run("mmdebstrap", "--variant=minbase", f"--include={packages}", DEBIAN, tar)
    run("docker", "import", tar, BASE)
    tar.unlink()
    _image(BUILD, _pip_files(directory / "pip"), f"FROM {BASE}\nCOPY . /\n")
    (empty := directory / "empty").mkdir()
    _image(
        PROMETHEUS,
        empty,
        f"FROM {BASE}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\\n"
        "    && install -d -o nobody /prometheus\n"
        'USER nobody\nENTRYPOINT ["prometheus"]\n',
    )


def _image(name: str, context: Path, dockerfile: str) -> None:
    build = ("docker", "build", "--network=host", "--tag", name, "--file=-", str(context))
    run(*build, input=dockerfile)


def _pip_files(root: Path) -> Path:
    """Files that pip needs in a container: its configuration, certificates and wheels."""
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    (root / certificates.relative_to("/").parent).mkdir(parents=True)
    shutil.copy(certificates, root / certificates.relative_to("/"))
    for folder in _wheels():
        shutil.copytree(folder, root / folder.relative_to("/"))
    lines = [f"cert = {certificates}", f"find-links = {' '.join(map(str, _wheels()))}"]
    if index := _pip_setting("index-url"):
        lines.append(f"index-url = {index}")
    (root / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    return root


def _pip_setting(name: str) -> str:
    found = subprocess.run(
        ["python3", "-m", "pip", "config", "get", f"global.{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


def _wheels() -> list[Path]:
    """Folders that pip takes wheels from."""
    return [path for line in _pip_setting("find-links").split() if (path := Path(line)).is_dir()]


def torch_index() -> dict[str, str]:
    """A build argument: pip's own index, if there is a PyTorch for CPUs in its folders."""
    if any(folder.glob("torch-*+cpu-*.whl") for folder in _wheels()):
        return {"TORCH_INDEX": _pip_setting("index-url") or "https://pypi.org/simple"}
    return {}


class Project:
    """The services of compose.yaml but Grafana, with small engines and images of their own.

    Args:
        directory: For the files that Compose reads.

    Attributes:
        models: The directory of compose.models.yaml's models.
    """

    def __init__(self, directory: Path) -> None:
        # Compose 1, which Debian has, knows no names of projects.
        for file in ("compose.yaml", "compose.models.yaml"):
            text = re.sub(r"^name: .*\n", "", (DOCKER / file).read_text(), flags=re.MULTILINE)
            (directory / file).write_text(text)
        arguments = {"BASE_IMAGE": BASE, "BUILD_IMAGE": BUILD}
        override = {
            name: {
                "image": f"{PROJECT}-{name}",
                "build": {"network": "host", "args": {**arguments, **more}},
            }
            for name, more in {"router": {}, "engine": torch_index()}.items()
        }
        self._directory, self.models = directory, directory / "models"
        others = {"prometheus": {"image": PROMETHEUS}, "models": {"image": f"{PROJECT}-engine"}}
        self._override = {**override, **others}
        self.use()
        self._environment = {
            **os.environ,
            "OCTAVO_PUBLISH": ADDRESS,
            "OCTAVO_CACHE_MEMORY": "0.25",
            "OCTAVO_SWAP_SPACE": "0.25",
            "OCTAVO_MODELS": str(self.models),
        }

    def use(self, **service: object) -> None:
        """Set more keys of router and engine, from the next `up` on."""
        services = {
            name: {**keys, **service} if name in {"router", "engine"} else keys
            for name, keys in self._override.items()
        }
        (self._directory / "override.yaml").write_text(yaml.safe_dump({"services": services}))

    def compose(self, *arguments: str) -> str:
        """Run docker-compose."""
        names = ("compose", "compose.models", "override")
        files = [f"--file={self._directory / name}.yaml" for name in names]
        start = ("docker-compose", *files, f"--project-directory={DOCKER}", f"-p{PROJECT}")
        return run(*start, *arguments, env=self._environment, cwd=DOCKER)

    def up(self, engines: int = 2) -> None:
        """Start missing containers, and scale to this number of engines."""
        self.compose(
            "up", "--detach", f"--scale=engine={engines}", "router", "engine", "prometheus"
        )

    def build(self) -> None:
        self.compose("build", "router", "engine")

    def put_the_model(self, user: str = "1000") -> None:
        """Copy the demo model's file into the volume: containers reach no package index."""
        self.compose("up", "--no-start", "engine")
        target = f"/cache/octavo/{(file := demo.file()).parent.name}"
        shell = f"umask 002 && mkdir -p {target} && cp /model/* {target}"
        self.in_volume(shell, f"--volume={file.parent}:/model:ro", user=user)

    def in_volume(self, shell: str, *flags: str, user: str) -> None:
        """Run a shell command in a container of the engine's image with its volume."""
        flags = (*flags, f"--volume={PROJECT}_cache:/cache", f"--user={user}", "--entrypoint=sh")
        run("docker", "run", "--rm", *flags, f"{PROJECT}-engine", "-c", shell)

    def containers(self, service: str) -> list["Container"]:
        """The running containers of a service, the oldest first."""
        label = f"label=com.docker.compose.service={service}"
        found = run("docker", "ps", "--quiet", "--filter", self.label, "--filter", label)
        return sorted(map(Container, found.split()), key=lambda c: c.inspect()["Created"])

    label = f"label=com.docker.compose.project={PROJECT}"

    def down(self) -> None:
        """Remove the project's containers, networks and volumes; check that none is left."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=5")
        for listed in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
            assert run("docker", *listed, "--quiet", "--filter", self.label) == ""


class Container:
    """A container, by its id."""

    def __init__(self, identity: str) -> None:
        self.identity = identity

    def inspect(self) -> Inspected:
        (found,) = json.loads(run("docker", "inspect", self.identity))
        return found

    def execute(self, *command: str) -> str:
        return run("docker", "exec", self.identity, *command)

    def logs(self) -> str:
        """Its output since its creation, including errors."""
        command = ["docker", "logs", self.identity]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
        return done.stdout

    def seconds_to_ready(self) -> float:
        """Duration of its last start, from its log."""
        lines = [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]
        return [line["seconds"] for line in lines if line["event"].endswith("is ready")][-1]

    def wait_healthy(self, seconds: float) -> None:
        """Wait until its image's HEALTHCHECK passes."""
        deadline = time.monotonic() + seconds
        while self.inspect()["State"]["Health"]["Status"] != "healthy":
            assert time.monotonic() < deadline, self.logs()[-4000:]
            time.sleep(1)

    def crash(self) -> None:
        """End its first process, as the kernel does when memory runs out, so Docker restarts it."""
        os.kill(self.inspect()["State"]["Pid"], 9)
