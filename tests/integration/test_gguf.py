"""`octavo serve --model FILE.gguf` as a process: right tokens, one conversion, refusals."""

from pathlib import Path

import pytest

import octavo
from octavo.common.models import demo
from tests.common.models import tiny_gguf
from tests.integration.conftest import SMALL

CHAT = [octavo.Message("user", "Name 3 things that are blue, and 12 more.")]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _answer(address: str) -> octavo.Completion:
    with octavo.Client(address) as client:
        stream = client.generate(CHAT, max_tokens=24, temperature=0, token_ids=True)
        return stream.complete()


@pytest.mark.slow
def test_the_demo_s_own_file_gives_the_demo_s_tokens(served, launch, cache, tmp_path):
    expected = _answer(served.address)
    file = demo.fetch(tmp_path)
    server = launch("serve", "--model", str(file), *SMALL).wait_ready()
    got = _answer(server.address)
    assert got.model == str(file)
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids
    assert got.text == expected.text
    assert server.logs().count("Converting") == 1


@pytest.mark.parametrize(
    "command",
    ["engine", pytest.param("serve", marks=pytest.mark.slow)],  # starts the same engine
)
def test_a_damaged_file_is_refused_in_a_line(command, launch, cache, tmp_path):
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:20_000])
    server = launch(command, "--model", str(file))
    assert server.process.wait(60) == 1
    assert f"{file} cannot be read; it is cut short or damaged" in server.logs()
    assert "Traceback" not in server.logs()
