"""compose.yaml in real containers: builds, serves, survives crashes, scales, and leaves nothing.

The tests run in their order, over one set of containers.
"""

import json
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import octavo
from benchmarks.fixture import make_model
from tests.deployment import containers
from tests.deployment.composed import services
from tests.deployment.containers import (
    ADDRESS,
    ANY_USER,
    OTHER_USER,
    PROJECT,
    Container,
    Project,
    run,
)
from tests.integration.harness import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GRPC = f"{ADDRESS}:50051"
PROMPTS = [f"Count from {start} upwards:" for start in range(8)]
LENGTH = 192
IMAGE_MB = {"router": 650, "engine": 2000}
"""Largest sizes; about 10% above the real ones."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    with containers.daemon(tmp_path_factory.mktemp("docker")):
        containers.make_base_images(tmp_path_factory.mktemp("images"))
        project = Project(tmp_path_factory.mktemp("compose"))
        try:
            project.build()
            project.put_the_model()
            project.up()
            wait_for_engines(2)
            yield project
        finally:
            project.down()


@pytest.fixture(scope="module")
def expected(project) -> list[str]:
    """The answers to the prompts while nothing happens."""
    return answers()


def answers(meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """The prompts' answers, streamed all at once; `meanwhile` runs once all have begun."""
    begun = threading.Barrier(len(PROMPTS) + 1)

    def answer(client: octavo.Client, prompt: str) -> str:
        stream = client.generate(prompt, max_tokens=LENGTH, ignore_eos=True, temperature=0)
        pieces = iter(stream)
        text = next(pieces).text
        begun.wait(120)
        text += "".join(piece.text for piece in pieces)
        assert [end.usage.output_tokens for end in stream.finished] == [LENGTH]
        return text

    with octavo.Client(GRPC) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = [threads.submit(answer, client, prompt) for prompt in PROMPTS]
        begun.wait(120)
        assert not any(future.done() for future in found), "they ended before anything happened"
        meanwhile()
        return [future.result() for future in found]


def wait_for_engines(number: int) -> None:
    def there() -> bool:
        with octavo.Client(GRPC) as client:
            try:
                return sum(model.engines for model in client.list_models(timeout=5)) == number
            except octavo.Error:
                return False

    wait_until(there, 600, f"{number} engines")


def asked(query: str) -> dict[str, float]:
    """The result of a Prometheus query, by instance."""
    url = f"http://127.0.0.1:9090/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=30) as page:
        found = json.load(page)["data"]["result"]
    return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}


def migrations(router: Container) -> float:
    """Number of requests that the router migrated, from its metrics."""
    read = "import urllib.request as u; print(u.urlopen('http://localhost:9151/metrics').read().decode())"
    lines = router.execute("python3", "-c", read).splitlines()
    counts = [line for line in lines if line.startswith("octavo_router_migrations_total")]
    return sum(float(line.split()[-1]) for line in counts)


def test_images_are_small_and_containers_start(project):
    for name, largest in IMAGE_MB.items():
        megabytes = int(run("docker", "inspect", "--format={{.Size}}", f"{PROJECT}-{name}")) / 1e6
        seconds = [container.seconds_to_ready() for container in project.containers(name)]
        print(f"{name}: {megabytes:.0f} MB, ready after {seconds} s the first time")
        assert megabytes < largest
    (engine, *_) = project.containers("engine")
    assert "kernels" not in engine.execute("ls", "/cache/octavo"), "the image lacks kernels"


@pytest.mark.parametrize("name", ["router", "engine"])
def test_a_container_is_confined(project, name):
    for container in project.containers(name):
        limit = services()[name]["deploy"]["resources"]["limits"]
        found = container.inspect()["HostConfig"]
        assert found["Memory"] == int(limit["memory"].removesuffix("g")) << 30
        assert found["NanoCpus"] == float(limit["cpus"]) * 1e9
        assert container.execute("id", "-u") == "1000"
        status = container.execute("cat", "/proc/1/status").split()
        assert int(status[status.index("CapEff:") + 1], 16) == 0
        assert status[status.index("NoNewPrivs:") + 1] == "1"
        container.execute("touch", "/cache/probe", "/tmp/probe")
        refused = ["docker", "exec", container.identity, "touch", "/opt/octavo/probe"]
        done = subprocess.run(refused, capture_output=True, text=True, check=False)
        assert "Read-only file system" in done.stderr


def test_prometheus_finds_every_container(project):
    wait_until(lambda: list(asked("up").values()) == [1.0] * 3, 60, "three targets")


def test_grpc_and_http_give_the_same_answer(project):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"max_tokens": 32, "temperature": 0}
    with octavo.Client(GRPC) as client:
        text = client.generate(chat, **options).text()
    http = openai.OpenAI(base_url=f"http://{ADDRESS}:8000/v1", api_key="none")
    chunks = http.chat.completions.create(model="demo", messages=chat, stream=True, **options)
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_health_checks_pass(project):
    for container in [*project.containers("router"), *project.containers("engine")]:
        container.wait_healthy(120)


def test_streams_survive_the_crash_of_an_engine_which_comes_back(project, expected):
    (router,), victim = project.containers("router"), project.containers("engine")[0]
    before = migrations(router)
    assert answers(victim.crash) == expected
    assert migrations(router) > before
    wait_for_engines(2)
    assert victim.inspect()["RestartCount"] == 1
    print(f"engine: ready after {victim.seconds_to_ready()} s the second time")


def test_engines_scale_under_streams(project, expected):
    project.up(engines=4)
    wait_for_engines(4)
    wait_until(lambda: len(asked("up == 1")) == 5, 60, "five targets")
    assert answers(lambda: project.up(engines=1)) == expected
    assert len(project.containers("engine")) == 1
    wait_for_engines(1)
    assert answers() == expected


def test_a_router_restarts_after_its_streams(project, expected):
    assert answers(lambda: project.compose("restart", "router")) == expected
    wait_for_engines(1)
    assert answers() == expected


def test_models_are_loaded_by_name_from_a_read_only_directory(project):
    tiny = project.models / "tiny"
    tiny.mkdir(parents=True)
    make_model(tiny)
    tables = '[models.demo]\n[models.tiny]\nmodel = "./tiny"\ncache_memory = 0.1\n'
    (project.models / "models.toml").write_text(tables)
    for path in [project.models, *project.models.rglob("*")]:
        path.chmod(0o755)
    project.compose("stop", "router", "engine")
    project.compose("up", "--detach", "models")
    (container,) = project.containers("models")
    container.wait_healthy(120)
    http = openai.OpenAI(base_url=f"http://{ADDRESS}:8000/v1", api_key="none")
    assert [model.id for model in http.models.list()] == ["demo", "tiny"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer = http.chat.completions.create(model="demo", messages=chat, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert http.completions.create(model="tiny", prompt="a", max_tokens=4).usage.completion_tokens
    refused = ["docker", "exec", container.identity, "touch", "/models/tiny/probe"]
    done = subprocess.run(refused, capture_output=True, text=True, check=False)
    assert "Read-only file system" in done.stderr
    shutil.rmtree(tiny)
    (project.models / "models.toml").write_text("[models.demo]\n")
    wait_until(lambda: len(list(http.models.list())) == 1, 60, "the file's change")
    project.compose("stop", "models")


def test_a_volume_that_is_given_to_another_user(project, expected):
    project.use(user=OTHER_USER)
    project.in_volume(f"chown -R {OTHER_USER} /cache", user="0")
    assert_serves(project, OTHER_USER, expected)


def test_any_user_of_group_0_in_a_new_volume(project, expected):
    project.down()
    project.use(user=ANY_USER)
    project.put_the_model(ANY_USER)
    assert_serves(project, ANY_USER, expected)


def assert_serves(project: Project, user: str, expected: list[str]) -> None:
    """Start all containers, and check their user and their answers."""
    project.up()
    wait_for_engines(2)
    for name in ("router", "engine"):
        for container in project.containers(name):
            assert f"{container.execute('id', '-u')}:{container.execute('id', '-g')}" == user
            container.wait_healthy(120)
    assert answers() == expected
