"""`octavo serve` as a process: start and end, and its child's."""

import signal
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import octavo
from benchmarks.fixture import make_model
from tests.integration.conftest import SMALL
from tests.integration.harness import READY_SECONDS, wait_until


@pytest.fixture
def launch(launch):
    """Starts the program itself."""
    return partial(launch, program=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Flags for a tiny random model, which starts faster than the demo."""
    return ("--model", make_model(tmp_path_factory.mktemp("model")), *SMALL)


def engine_of(server) -> psutil.Process:
    """Return the child that computes; the other one is multiprocessing's tracker."""
    return max(server.children(), key=lambda child: child.memory_info().rss)


def test_drains_then_ends(tiny, launch):
    server = launch("serve", *tiny).wait_ready()
    texts = []
    with octavo.Client(server.address) as client:
        stream = client.generate("Once upon a time", max_tokens=700, ignore_eos=True)
        thread = threading.Thread(target=lambda: texts.append(stream.complete()))
        thread.start()
        wait_until(lambda: stream.accepted is not None)
        engine = engine_of(server)
        (socket,) = {c.laddr for c in engine.net_connections("unix") if "octavo-" in c.laddr}
        listening = {c.laddr.port for c in engine.net_connections("tcp") if c.status == "LISTEN"}
        assert listening == {server.metrics_port + 1}
        assert Path(socket).parent.stat().st_mode & 0o777 == 0o700
        assert "libtorch" in Path(f"/proc/{engine.pid}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()  # the router's
        assert server.terminate() == 0, server.logs()
        thread.join(10)
    assert texts[0].usage.output_tokens == 700
    assert not engine.is_running()
    assert not Path(socket).parent.exists()


def test_engine_dies_with_a_killed_parent(tiny, launch):
    server = launch("serve", *tiny, program=False).wait_ready()
    children = server.children()
    assert children
    server.kill()
    wait_until(lambda: not any(child.is_running() for child in children), what="no child left")


def test_ends_when_the_engine_dies(tiny, launch):
    server = launch("serve", *tiny, program=False).wait_ready()
    engine_of(server).send_signal(signal.SIGKILL)
    assert server.process.wait(30) == 1
    assert "the engine ended unexpectedly (killed by SIGKILL" in server.logs()


def test_says_why_it_cannot_start(launch):
    server = launch("serve", "--model", "./no-such-model")
    assert server.process.wait(60) == 1
    assert "'./no-such-model' is not a local directory" in server.logs()
    assert "Traceback" not in server.logs()


@pytest.mark.parametrize(
    "command",
    [pytest.param(("serve", "--tokenizer", "demo"), marks=pytest.mark.slow), ("engine",)],
)
def test_says_in_a_line_why_a_model_cannot_be_served(demo_model, tmp_path, launch, command):
    config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaConfig(**config, num_attention_heads=2, vocab_size=50).save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.ones(50, 64)}, tmp_path / "model.safetensors")
    server = launch(*command, "--model", str(tmp_path), program=False)
    assert server.process.wait(READY_SECONDS) == 1
    (line,) = [line for line in server.logs().splitlines() if line.startswith("error: ")]
    assert f"{tmp_path} lacks 11 of the model's weights, such as model.embed_tokens.weight" in line
    assert "Traceback" not in server.logs()
