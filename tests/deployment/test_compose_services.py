"""compose.yaml's services as local processes: same commands and environment, other addresses."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compose_spec import parse_duration

import octavo
from benchmarks.fixture import make_model
from benchmarks.metrics import Metrics
from octavo.common.ports import free_port
from tests import preloaded
from tests.deployment import dashboard
from tests.deployment.composed import DOCKER, Image, here, process, services
from tests.deployment.prometheus import Prometheus
from tests.integration.harness import wait_until

READY_SECONDS = 180.0
"""Generous timeout: CI's machines may be busy."""
ROUTER, ENGINES = "127.0.0.1", ("127.0.0.2", "127.0.0.3")
SMALL = {
    "OCTAVO_NUM_BLOCKS": "32",
    "OCTAVO_SWAP_SPACE": "0.001",
    "OCTAVO_MAX_MODEL_LEN": "512",
    "OCTAVO_SERVED_MODEL_NAME": "tiny",
    "OMP_NUM_THREADS": "1",
}


class Container:
    """A service's process, at a loopback address instead of its container's."""

    def __init__(self, name: str, host: str, log: Path, model: str, **own: str) -> None:
        self.host, self._log = host, log
        self.service = services(OCTAVO_MODEL=model)[name]
        self._command, environment = process(self.service)
        assert environment["OCTAVO_HOST"] == "0.0.0.0"
        probed = f"{host}:{own['OCTAVO_PORT']}"
        own |= {"OCTAVO_HOST": host, "OCTAVO_ADDRESS": probed}
        self._environment = here({**environment, **own})
        self.metrics_port = int(own["OCTAVO_METRICS_PORT"])
        self._process = self._start(self._command)

    def _start(self, command: list[str]) -> preloaded.Process:
        program, *arguments = command
        assert program == "octavo"
        return preloaded.Process(program, arguments, self._log, environment=self._environment)

    def probe(self) -> int:
        """Return the exit code of its image's HEALTHCHECK."""
        image = Image(DOCKER.parent / self.service["build"]["dockerfile"])
        return self._start(image.probe).wait(60)

    def metric(self, name: str, **labels: str) -> float:
        return Metrics(self.metrics_port, self.host).value(name, **labels)

    def terminate(self) -> None:
        """Send SIGTERM, as `docker stop` does first."""
        self._process.send_signal(signal.SIGTERM)

    def stopped(self) -> int:
        """Wait as long as `docker stop` would; return the exit code."""
        grace = parse_duration(self.service["stop_grace_period"])  # in seconds
        return self._process.wait(grace)

    def check(self) -> None:
        """Fail with the log if the process has ended."""
        assert self._process.poll() is None, self._log.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Stand:
    """The router and both engines of compose.yaml."""

    def __init__(self, directory: Path) -> None:
        model = make_model(directory / "model")
        ports = {"OCTAVO_PORT": str(free_port()), "OCTAVO_METRICS_PORT": str(free_port())}
        self.engines = [
            Container("engine", host, directory / f"{host}.log", model, **SMALL, **ports)
            for host in ENGINES
        ]
        self.address = f"{ROUTER}:{free_port()}"
        addresses = [f"{host}:{ports['OCTAVO_PORT']}" for host in ENGINES]
        name = services()["router"]["environment"]["OCTAVO_ENGINE"]
        assert name == "dns:///engine:50052"
        self.router = Container(
            "router",
            ROUTER,
            directory / "router.log",
            model,
            OCTAVO_ENGINE=",".join(addresses),
            OCTAVO_HTTP_HOST=ROUTER,
            OCTAVO_HTTP_PORT=str(free_port()),
            OCTAVO_PORT=self.address.split(":")[1],
            OCTAVO_METRICS_PORT=str(free_port()),
        )

    @property
    def containers(self) -> list[Container]:
        return [self.router, *self.engines]

    def wait(self) -> None:
        """Wait until the router has both engines."""

        def ready() -> bool:
            for container in self.containers:
                container.check()
            with octavo.Client(self.address) as client:
                try:
                    return sum(model.engines for model in client.list_models(timeout=5)) == 2
                except octavo.Error:
                    time.sleep(0.2)
                    return False

        wait_until(ready, READY_SECONDS, "both engines")

    def generate(self, prompt: str, tokens: int) -> int:
        """Stream an answer; return its number of pieces."""
        with octavo.Client(self.address) as client:
            stream = client.generate(prompt, max_tokens=tokens, ignore_eos=True)
            pieces = sum(1 for _ in stream)
            assert [end.usage.output_tokens for end in stream.finished] == [tokens]
            return pieces

    def load(self, requests: int, tokens: int) -> list[int]:
        """Stream answers concurrently."""
        prompts = [f"{number} " * 40 for number in range(requests)]
        with ThreadPoolExecutor(requests) as threads:
            return list(threads.map(self.generate, prompts, [tokens] * requests))


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    stand = Stand(tmp_path_factory.mktemp("compose"))
    try:
        stand.wait()
        yield stand
    finally:
        for container in stand.containers:
            container.close()


def test_answers_stream_from_both_engines(stand):
    assert min(stand.load(8, 24)) > 1
    assert all(engine.metric("octavo_engine_output_tokens_total") > 0 for engine in stand.engines)
    assert stand.router.metric("octavo_router_output_tokens_total", model="tiny") == 8 * 24
    wait_until(  # otherwise the alert on stuck engines would fire on idle ones
        lambda: sum(e.metric("octavo_engine_groups", state="running") for e in stand.engines) == 0
    )


def test_the_images_probes(stand):
    assert [container.probe() for container in stand.containers] == [0, 0, 0]


def test_every_panel_of_the_dashboard_shows_something(stand, tmp_path):
    targets = {
        "octavo-router": [f"{ROUTER}:{stand.router.metrics_port}"],
        "octavo-engine": [f"{e.host}:{e.metrics_port}" for e in stand.engines],
    }
    try:
        prometheus = Prometheus(tmp_path, targets)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with prometheus:
        wait_until(
            lambda: [value for _, value in prometheus.query("up")] == [1.0] * 3, 60, "the targets"
        )
        stand.load(8, 64)  # seen by the scrapes before and after

        deadline = time.monotonic() + 20
        while (empty := _empty(prometheus)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert empty == set()
        assert prometheus.query('ALERTS{alertstate="firing"}') == []


def _empty(prometheus: Prometheus) -> set[str]:
    """The dashboard's queries that return nothing unless calls fail."""
    return {
        f"{panel.title}: {query}"
        for panel in dashboard.panels("30s")
        for _, query in panel.queries
        if panel.title != "Tenants' calls that failed" and not prometheus.query(query)
    }


def test_stopping_breaks_no_stream(stand):
    with octavo.Client(stand.address) as client:
        stream = client.generate("on and on", max_tokens=256, ignore_eos=True)
        pieces = iter(stream)
        next(pieces)
        for container in stand.containers[:2]:  # the router and perhaps its own engine
            container.terminate()
        assert stand.router.probe() == 1
        assert sum(1 for _ in pieces) > 1
        assert [end.usage.output_tokens for end in stream.finished] == [256]
        with pytest.raises(octavo.UnavailableError):
            client.generate("too late", max_tokens=1, timeout=10).text()
    stand.engines[1].terminate()
    assert [container.stopped() for container in stand.containers] == [0, 0, 0]
