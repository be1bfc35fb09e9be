"""Prefixes in files: found after a restart, shared by engines, and recomputed where files fail."""

import fcntl
import os
import shutil
import struct
import termios
import time
from contextlib import contextmanager

import pytest
from transformers import BambaConfig, LlamaConfig, MistralConfig

from octavo.common.kv_cache.prefix_hash import reusable_keys
from octavo.engine.kv_disk import reads
from octavo.v1.engine_pb2 import Started
from tests.engine.random_model import TINY, save_random_model
from tests.engine.test_core import PATIENCE, Running
from tests.integration.harness import wait_until

PROMPT, OUTPUT = 100, 12
CONFIGS = {
    "full attention": LlamaConfig(**TINY),
    "sliding windows": MistralConfig(**TINY | {"sliding_window": 24}),
    "states": BambaConfig(
        **TINY | {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1},
        attn_layer_indices=[1],
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS[request.param], path, std=0.12)
    return path


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let a busy machine delay reads."""
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.5)


@contextmanager
def running(model, disk, **settings):
    """An engine that keeps prefixes in `disk`."""
    engine = Running(model, kv_disk=disk, swap_space=0.1, **settings)
    try:
        yield engine
    finally:
        engine.core.stop()
        engine.thread.join(PATIENCE)
        assert not engine.thread.is_alive()


def generate(engine, name):
    """Return the output of a prompt, and how many of its tokens were cached."""
    engine.submit(name, PROMPT, OUTPUT)
    return outcome(engine, name)


def outcome(engine, name):
    engine.heard.wait(lambda: engine.heard.ended(name))
    engine.wait_idle()
    (start,) = (event for event in engine.heard.events[name] if isinstance(event, Started))
    tokens = [token for event in engine.heard.outputs(name) for token in event.token_ids]
    return tokens, start.cached_tokens


def written(engine):
    """Wait until all blocks are written."""
    tier = engine.parts.disk
    wait_until(lambda: not tier._pending, what="the last write")
    time.sleep(0.05)  # the write itself
    return tier.counters["written"]


@pytest.fixture
def filled(model, tmp_path):
    """The output of a prompt; its blocks are in `tmp_path`."""
    with running(model, tmp_path) as engine:
        tokens, cached = generate(engine, "a")
        assert cached == 0
        assert written(engine) > 0
    return tokens


def test_a_restarted_engine_finds_its_prefixes(model, filled, tmp_path):
    with running(model, tmp_path) as engine:
        assert generate(engine, "a") == (filled, 96)
        assert generate(engine, "b") == (filled, 96)  # from memory now
        assert engine.parts.disk.counters["read"] > 0
        sample = engine.metrics.registry.get_sample_value
        assert sample("octavo_engine_disk_blocks_total", {"what": "read"}) > 0
        assert sample("octavo_engine_disk_blocks_held") >= engine.parts.disk.counters["read"]
        assert engine.parts.disk.published == engine.parts.disk.held  # routers know them
        assert 0 < engine.core.load.disk_read_share <= 1


def test_other_settings_use_other_files(model, filled, tmp_path):
    with running(model, tmp_path, block_size=32) as engine:
        assert generate(engine, "a") == (filled, 0)


def test_whole_numbers_are_found_and_those_of_other_types_are_not(model, filled, tmp_path):
    with running(model, tmp_path, kv_cache_dtype="int8") as engine:
        tokens, cached = generate(engine, "a")
        assert cached == 0
        assert written(engine) > 0
    with running(model, tmp_path, kv_cache_dtype="int8") as engine:
        again, cached = generate(engine, "a")
        assert again == tokens
        assert cached >= 64  # blocks of small types may have more tokens


def test_damaged_files_are_recomputed(model, filled, tmp_path):
    for path in tmp_path.rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with running(model, tmp_path) as engine:
        assert generate(engine, "a") == (filled, 0)


def test_files_that_are_gone_when_they_are_read_are_recomputed(model, filled, tmp_path):
    with running(model, tmp_path) as engine:
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        assert generate(engine, "a") == (filled, 0)


def test_nobody_waits_for_a_disk_that_hangs(model, filled, tmp_path):
    with running(model, tmp_path) as engine:
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
            os.mkfifo(path)  # opening it waits for a writer that never comes
        assert generate(engine, "a") == (filled, 0)
        assert engine.parts.disk.counters["late"] == 1
        assert generate(engine, "b") == (filled, 96)  # from memory


def unread(pipe):
    """Return the number of bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.parametrize("model", ["full attention"], indirect=True)
def test_a_directory_that_vanishes_in_mid_read_costs_only_its_rest(model, filled, tmp_path):
    keys = list(reusable_keys(range(3, 3 + PROMPT), 16))
    with running(model, tmp_path) as engine:
        third = engine.parts.disk._files._path(keys[2])
        contents = third.read_bytes()
        third.unlink()
        os.mkfifo(third)
        with third.open("r+b", buffering=0) as pipe:
            pipe.write(contents[:1000])
            engine.submit("a", PROMPT, OUTPUT)
            wait_until(lambda: not unread(pipe))
            shutil.rmtree(tmp_path)
        assert outcome(engine, "a") == (filled, 32)


def test_a_request_that_is_aborted_while_it_is_read_ends(model, filled, tmp_path):
    with running(model, tmp_path) as engine:
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
            os.mkfifo(path)
        engine.submit("a", PROMPT, OUTPUT)
        wait_until(lambda: engine.core.read_ahead.reads)
        assert not engine.core.idle
        engine.core.abort(0, "a")
        engine.wait_idle()
        assert engine.outcome("aborted") == 1


def test_a_disk_that_cannot_be_written_to_changes_no_output(model, filled, tmp_path):
    with running(model, tmp_path / "other") as engine:
        directory = engine.parts.disk._files._directory
        directory.rename(directory.with_name("moved"))
        directory.write_bytes(b"a file in the directory's place")
        assert generate(engine, "a") == (filled, 0)
        wait_until(lambda: engine.parts.disk.counters["dropped"] > 0)
        assert engine.parts.disk.counters["written"] == 0
