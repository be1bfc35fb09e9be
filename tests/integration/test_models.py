"""`octavo serve` with several models, loaded on demand within a bound of memory."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from typer.testing import CliRunner

import octavo
from benchmarks.fixture import make_model
from octavo.cli import app
from octavo.common.ports import free_port
from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.integration.harness import wait_until

NAMES = ("one", "two", "three")
ONE_MODEL = "0.9"
"""--memory with room for one tiny model: by estimate, an engine needs 0.7 GiB, and an eighth of
--memory for its KV cache."""
TWO_MODELS = "1.9"
"""--memory with room for two of them."""


@pytest.fixture(scope="module")
def models_file(tmp_path_factory) -> Path:
    """A file of three models: small random ones that differ, and one that does not exist."""
    directory = tmp_path_factory.mktemp("models")
    lines = []
    for seed, name in enumerate(NAMES):
        (directory / name).mkdir()
        model = make_model(directory / name, seed=seed)
        lines += [f"[models.{name}]", f"model = {model!r}", f"aliases = ['{name}-alias']"]
        lines += ["num_blocks = 256", "max_model_len = 1024"]
    lines += ["[models.missing]", "model = './missing'"]
    path = directory / "models.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def serve(launch, models_file):
    """Starts a server of the models' file with a memory in GiB and further flags."""

    def start(memory: str, *flags: str, spare: bool = False):
        ports = free_port(), free_port()
        server = launch(
            *("serve", "--models", str(models_file), "--memory", memory, *flags),
            "--spare-engine" if spare else "--no-spare-engine",
            *("--http-port", str(ports[0]), "--admin-port", str(ports[1])),
            program=True,  # engines cannot be forked from a process that serves
        )
        server.http, server.admin = (f"127.0.0.1:{port}" for port in ports)
        return server.wait_ready()

    return start


def engines(server) -> list[psutil.Process]:
    """Return the engine processes: the children that have loaded PyTorch."""
    found = []
    for child in server.children():
        try:
            maps = Path(f"/proc/{child.pid}/maps").read_text()
        except OSError:  # it has ended
            continue
        if "libtorch_cpu" in maps and child.status() != psutil.STATUS_ZOMBIE:
            found.append(child)
    return found


def generate(server, model: str, prompt: str, tokens: int = 12) -> str:
    with octavo.Client(server.address) as client:
        stream = client.generate(
            prompt, model=model, max_tokens=tokens, ignore_eos=True, temperature=0
        )
        return stream.complete().outputs[0].text


def states(server) -> dict[str, str]:
    listed = httpx.get(f"http://{server.http}/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in listed}


def test_loads_what_is_asked_for_and_unloads_the_least_recently_used(serve):
    server = serve(ONE_MODEL)
    assert engines(server) == []
    assert set(states(server).values()) == {"unloaded"}
    with octavo.Client(server.address) as client:
        stream = client.generate("Hello", model="one-alias", max_tokens=12, ignore_eos=True)
        loading, *events = stream.events()
    assert loading == octavo.Loading("one", 1)
    assert isinstance(next(each for each in events if each != loading), octavo.Accepted)
    first = generate(server, "one", "Hello")
    assert states(server)["one"] == states(server)["one-alias"] == "loaded"
    second = generate(server, "two-alias", "Hello", 900)
    assert first
    assert not second.startswith(first)
    assert states(server)["one"] == "unloaded"
    with octavo.Client(server.address) as client:
        stream = client.generate(
            "Hello", model="two", max_tokens=900, ignore_eos=True, temperature=0
        )
        events = iter(stream)
        text = next(events).text
        (engine,) = engines(server)
        engine.kill()  # the stream goes on when it is back
        assert text + "".join(event.text for event in events) == second
    with pytest.raises(octavo.Error, match="model 'missing' could not be loaded") as raised:
        generate(server, "missing", "Hello")
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    assert states(server)["missing"] == "failed"
    assert "'./missing' is not a local directory" in server.logs()
    with grpc.insecure_channel(server.admin) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        assert admin.LoadModel(admin_pb2.LoadModelRequest(model="two-alias")).model == "two"
        admin.UnloadModel(admin_pb2.UnloadModelRequest(model="two"))
        assert states(server)["two"] == "unloaded"
        assert engines(server) == []
        with pytest.raises(grpc.RpcError, match="cannot be loaded or unloaded"):
            admin.UnloadModel(admin_pb2.UnloadModelRequest(model="four"))
    children = server.children()
    assert server.terminate() == 0, server.logs()
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


def test_reads_the_file_again(launch, tmp_path):
    path, port = tmp_path / "models.toml", free_port()
    path.write_text("[models.a]\n[models.b]\naliases = ['c']")
    server = launch("serve", "--models", str(path), "--http-port", str(port)).wait_ready()
    server.http = f"127.0.0.1:{port}"
    assert states(server).keys() == {"a", "b", "c"}
    path.write_text("[models.a]\nblock_sizes = 1")
    wait_until(lambda: "models not reloaded" in server.logs())
    assert "there is no setting 'block_sizes'" in server.logs()
    assert states(server).keys() == {"a", "b", "c"}
    path.write_text("[models.b]\n[models.d]\nmodel = './none'")
    wait_until(lambda: states(server).keys() == {"b", "d"})


def test_offers_the_files_and_directories_of_a_directory(launch, tmp_path):
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "mmproj-a.gguf", "e"):
        (tmp_path / name).touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").touch()
    (tmp_path / "d").mkdir()
    port = free_port()
    server = launch("serve", "--models-dir", str(tmp_path), "--http-port", str(port)).wait_ready()
    server.http = f"127.0.0.1:{port}"
    assert states(server).keys() == {"a", "b", "c"}
    (tmp_path / "d" / "config.json").touch()
    (tmp_path / "a.gguf").unlink()
    wait_until(lambda: states(server).keys() == {"b", "c", "d"})
    with pytest.raises(octavo.Error, match="model 'b' could not be loaded"):
        generate(server, "b", "Hello")
    assert "b-00001-of-00002.gguf" in server.logs()


@pytest.mark.slow
def test_a_file_rewritten_badly_changes_nothing(launch, models_file, tmp_path):
    path, port = tmp_path / "models.toml", free_port()
    path.write_text(models_file.read_text())
    server = launch(
        *("serve", "--models", str(path), "--http-port", str(port)), program=True
    ).wait_ready()
    server.http = f"127.0.0.1:{port}"
    before = states(server)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(generate, server, "one", "Hello")
        wait_until(lambda: states(server)["one"] == "loading")
        for number, bad in enumerate(
            (b"\xff\x00[", b"", b"[models]", b"a = " + b"[" * 9999, None), 1
        ):
            path.unlink() if bad is None else path.write_bytes(bad)
            wait_until(lambda: server.logs().count("models not reloaded") == number)  # noqa: B023
        assert waiting.result()
    assert states(server).keys() == before.keys()
    path.write_text("[models.one]\nmodel = './none'")
    wait_until(lambda: states(server).keys() == {"one"})


@pytest.mark.slow
def test_an_engine_is_killed_while_it_loads_and_while_it_is_unloaded(serve):
    server = serve(ONE_MODEL)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(generate, server, "one", "Hello") for _ in range(2)]
        wait_until(lambda: engines(server), 60)
        engines(server)[0].kill()
        for each in waiting:
            with pytest.raises(octavo.Error, match="model 'one' could not be loaded") as raised:
                each.result(20)
            assert raised.value.code is grpc.StatusCode.UNAVAILABLE
        assert "the engine of 'one' died while starting (killed by SIGKILL" in server.logs()
        alone = generate(server, "one", "Hello", 900)
        with (
            octavo.Client(server.address) as client,
            grpc.insecure_channel(server.admin) as channel,
        ):
            stream = client.generate(
                "Hello", model="one", max_tokens=900, ignore_eos=True, temperature=0
            )
            pieces = iter(stream)
            text = next(pieces).text
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            unloading = pool.submit(admin.UnloadModel, admin_pb2.UnloadModelRequest(model="one"))
            wait_until(lambda: states(server)["one"] == "unloading")
            late = pool.submit(generate, server, "one", "Hello", 900)
            engines(server)[0].kill()
            assert text + "".join(piece.text for piece in pieces) == alone
            assert late.result(60) == alone
            unloading.result(60)
    children = server.children()
    assert server.terminate() == 0, server.logs()
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["begins", "loads"])
def test_an_engine_that_loads_ends_with_a_killed_server(serve, when):
    server = serve(ONE_MODEL)
    before = {child.pid for child in server.children()}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(generate, server, "one", "Hello")
        wait_until(
            lambda: engines(server) if when == "loads" else server.children()[len(before) :], 60
        )
        children = server.children()
        server.kill()
        with pytest.raises(octavo.UnavailableError):
            waiting.result(20)
    wait_until(lambda: not any(child.is_running() for child in children), 20, "no child left")


@pytest.mark.slow
def test_a_model_with_other_settings_is_loaded_again(launch, models_file, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(models_file.read_text())
    port = free_port()
    flags = "--memory", TWO_MODELS, "--http-port", str(port), "--no-spare-engine"
    server = launch("serve", "--models", str(path), *flags, program=True).wait_ready()
    server.http = f"127.0.0.1:{port}"
    first = [generate(server, name, "Hello") for name in ("one", "two")]
    with octavo.Client(server.address) as client:
        stream = client.generate("Hello", model="one", max_tokens=900, temperature=0)
        pieces = iter(stream)
        next(pieces)
        changed = path.read_text().replace("max_model_len = 1024", "max_model_len = 512", 1)
        path.write_text(changed.partition("[models.two]")[0])
        wait_until(lambda: states(server).keys() == {"one", "one-alias"}, 20)
        assert sum(1 for _ in pieces) > 0  # it is complete, as the engine waits for it
    assert generate(server, "one", "Hello") == first[0]
    card = httpx.get(f"http://{server.http}/v1/models/one").json()
    assert card["max_model_len"] == 512
    wait_until(lambda: len(engines(server)) == 1, 20)
    with pytest.raises(octavo.Error, match="model 'two' is not served"):
        generate(server, "two", "Hello")


@pytest.mark.slow
def test_a_spare_engine_takes_the_next_model(serve):
    server = serve(TWO_MODELS, spare=True)
    wait_until(lambda: len(engines(server)) == 1, 60)
    (spare,) = engines(server)
    first = generate(server, "one", "Hello")
    wait_until(lambda: len(engines(server)) == 2, 60)
    (second,) = {*engines(server)} - {spare}
    second.kill()  # nobody notices
    assert generate(server, "two", "Hello") != first
    assert len(engines(server)) == 2
    assert spare.is_running()
    assert generate(server, "one", "Hello") == first
    children = server.children()
    assert server.terminate() == 0, server.logs()
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


@pytest.mark.slow
def test_requests_that_wait_for_a_model_hear_of_the_end(serve):
    server = serve(ONE_MODEL, "--drain-timeout", "0.5")
    body = {"model": "one", "prompt": "Hello", "max_tokens": 3}
    with ThreadPoolExecutor() as pool:
        grpc_call = pool.submit(generate, server, "one", "Hello")
        http_call = pool.submit(httpx.post, f"http://{server.http}/v1/completions", json=body)
        wait_until(lambda: states(server)["one"] == "loading")
        assert server.terminate() == 0, server.logs()
        with pytest.raises(octavo.UnavailableError, match="the router shut down before"):
            grpc_call.result()
        assert http_call.result().status_code == 503
        assert "the router shut down before" in http_call.result().text


@pytest.mark.slow
def test_engines_end_with_a_killed_server(serve):
    server = serve(ONE_MODEL)
    generate(server, "one", "Hello")
    children = server.children()
    server.kill()
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


@pytest.mark.slow
def test_three_models_within_the_memory_of_two(serve):
    """200 requests of 8 clients in random order: all complete, with the outputs of each alone."""
    server = serve(TWO_MODELS, spare=True)
    prompts = [f"Prompt {number}" for number in range(8)]
    alone = {(name, p): generate(server, name, p) for name in NAMES for p in prompts}
    draw = random.Random(0)
    asked = [(draw.choice(NAMES), draw.choice(prompts)) for _ in range(200)]
    used: list[tuple[int, int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            running = engines(server)
            used.append((len(running), sum(each.memory_info().rss for each in running)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as clients:
        outputs = list(clients.map(lambda each: generate(server, *each), asked))
    done.set()
    watcher.join()
    assert outputs == [alone[each] for each in asked]
    assert max(count for count, _ in used) == 2
    assert max(size for _, size in used) < float(TWO_MODELS) * 2**30
    children = server.children()
    assert server.terminate() == 0
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


@pytest.mark.slow
def test_unloads_an_idle_model_and_keeps_a_pinned_one(launch, models_file, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(models_file.read_text().replace("[models.two]", "pin = true\n[models.two]"))
    port = free_port()
    server = launch(
        *("serve", "--models", str(path), "--memory", TWO_MODELS, "--idle-timeout", "1"),
        *("--admin-port", str(port), "--no-spare-engine"),
        program=True,
    ).wait_ready()
    wait_until(lambda: len(engines(server)) == 1, 60)
    generate(server, "two", "Hello")
    wait_until(lambda: len(engines(server)) == 1, 10)
    generate(server, "one", "Hello")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="model 'one' is pinned"):
            admin.UnloadModel(admin_pb2.UnloadModelRequest(model="one"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[models", "is not valid TOML"),
        ("port = 1", "has the key 'port' outside of a model"),
        ("", "has no table of a model"),
        ("models.a = 1", "models.a is not a table"),
        ("[models.a]\nport = 1", "model 'a': port cannot be set for one model"),
        ("[models.a]\nblock_sizes = 16", "model 'a': there is no setting 'block_sizes'"),
        ("[models.a]\npin = 1", "model 'a': pin: Input should be a valid boolean"),
        ("[models.a]\nidle_timeout = -1", "model 'a': idle_timeout: Input should be greater"),
        ("[models.a]\nnum_blocks = 0", "model 'a': --num-blocks: Input should be greater"),
        ("[models.a]\naliases = ['b']\n[models.b]", "the name 'b' is used twice"),
    ],
)
def test_refuses_a_bad_file(tmp_path, content, message):
    path = tmp_path / "models.toml"
    path.write_text(content)
    result = CliRunner().invoke(app, ["serve", "--models", str(path)])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
