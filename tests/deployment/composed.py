"""Reads docker/compose*.yaml and Dockerfiles as Compose and Docker would, without either."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"


def interpolated(name: str, **variables: str) -> str:
    """Return a compose file's text with its ${VARIABLE:-default}s filled in."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1]) or match[2] or ""

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, (DOCKER / name).read_text())


def services(**variables: str) -> dict[str, Any]:
    """The services of compose.yaml."""
    return yaml.safe_load(interpolated("compose.yaml", **variables))["services"]


class Image:
    """The image of a Dockerfile's last stage.

    Attributes:
        environment: Variables of ENV.
        command: Arguments of ENTRYPOINT.
        default: Arguments of CMD, which follow `command` by default.
        probe: Arguments of HEALTHCHECK.
        sources: Paths copied from the repository.
    """

    def __init__(self, dockerfile: Path) -> None:
        text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        last = max(i for i, line in enumerate(lines) if line.startswith("FROM"))
        said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[last:]}
        self.environment = dict(pair.split("=", 1) for pair in shlex.split(said["ENV"]))
        self.command: list[str] = json.loads(said["ENTRYPOINT"])
        self.default: list[str] = json.loads(said["CMD"])
        self.probe: list[str] = json.loads(said["HEALTHCHECK"].split("CMD", 1)[1])
        self.user = said["USER"]
        copies = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY")]
        self.sources = [s for copy in copies if not copy[0].startswith("--from") for s in copy]


def process(service: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a service's container, without this machine's."""
    image = Image(DOCKER.parent / service["build"]["dockerfile"])
    environment = {**image.environment, **service["environment"]}
    return [*image.command, *service.get("command", image.default)], {
        name: str(value)
        for name, value in environment.items()
        if value is not None  # an empty variable, as Compose 1 reads it
    }


def here(environment: dict[str, str]) -> dict[str, str]:
    """Return a container's environment with this machine's PATH and cache."""
    own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    placed = {"PATH", "HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    kept = {name: value for name, value in environment.items() if name not in placed}
    return {**kept, **own}
