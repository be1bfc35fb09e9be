"""Prometheus' programs: a server on loopback with docker/prometheus' files, and promtool."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from octavo.common.ports import free_port
from tests.deployment.composed import DOCKER

CONFIGURATION = DOCKER / "prometheus"
READY_SECONDS = 60.0

Labels = dict[str, str]


class Prometheus:
    """A process that scrapes; a context manager.

    Args:
        directory: Directory for its configuration, data and log.
        targets: HOST:PORTs by job of prometheus.yml.
        interval: Seconds between scrapes.

    Raises:
        FileNotFoundError: No `prometheus` is installed.
        TimeoutError: It does not start.
    """

    def __init__(self, directory: Path, targets: dict[str, list[str]], interval: int = 1) -> None:
        if shutil.which("prometheus") is None:
            raise FileNotFoundError("needs prometheus (Debian: apt-get install prometheus)")
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(CONFIGURATION / "alerts.yml", directory)
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(_configuration(targets, interval)))
        self.url = f"http://127.0.0.1:{free_port()}"
        address = self.url.removeprefix("http://")
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={file}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        """Wait until it answers."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.__exit__()
                    raise TimeoutError("prometheus does not start") from None
                time.sleep(0.1)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """Return the current values of an expression."""
        found = self._get("query", query=expression)
        return [(series["metric"], float(series["value"][1])) for series in found]

    def _get(self, what: str, **arguments: str | float) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=30) as page:
            answer = json.load(page)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def _configuration(targets: dict[str, list[str]], interval: int) -> dict[str, Any]:
    """Return prometheus.yml with addresses instead of names."""
    made: dict[str, Any] = yaml.safe_load((CONFIGURATION / "prometheus.yml").read_text())
    made["global"] = dict.fromkeys(made["global"], f"{interval}s")
    for job in made["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    return made


def promtool(*arguments: str, directory: Path) -> None:
    """Run promtool in a directory; skip the test if it is not installed."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
