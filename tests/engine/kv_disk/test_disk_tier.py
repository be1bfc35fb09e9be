"""A read of blocks is cancelled when computing them is faster, even before it begins."""

import os
import time

import numpy as np
import pytest

from octavo.engine.kv_disk import reads
from octavo.engine.kv_disk.block_files import BlockFiles
from octavo.engine.kv_disk.disk_tier import READERS, DiskTier
from tests.integration.harness import wait_until

SIZE, SECONDS = 1000, 20.0
KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def tier(tmp_path, monkeypatch):
    """A tier of four blocks, of which the third and the fourth cannot be read to the end."""
    monkeypatch.setattr(reads, "MAX_DELAY", 0.02)
    monkeypatch.setattr(reads, "MIN_DELAY_SECONDS", 0.5)  # the machine may be busy
    files = BlockFiles(tmp_path, "a", SIZE, 1 << 30)
    for key in KEYS:
        files.write(key, np.full(SIZE, key[0], np.uint8))
    for key in KEYS[2:]:
        path = files._path(key)
        path.unlink()
        os.mkfifo(path)
    tier = DiskTier(files)
    yield tier
    tier.close()
    for key in KEYS[2:]:
        os.close(os.open(files._path(key), os.O_RDWR | os.O_NONBLOCK))


def start(tier, keys, seconds, ended):
    """Read blocks, and add them to `ended` at the end."""
    tier.reads.start(tier, keys, seconds, lambda _read, blocks, _ended: ended.append(blocks))


def test_reads_that_wait_for_hanging_ones_end_with_them(tier):
    ended = []
    began = time.monotonic()
    for _ in range(READERS + 3):
        start(tier, KEYS[2:], SECONDS, ended)
    wait_until(lambda: len(ended) == READERS + 3)
    assert time.monotonic() - began < SECONDS / 2
    assert ended == [[]] * (READERS + 3)
    assert tier.counters["late"] == READERS + 3
    assert not tier.reads.worthwhile(tier, 1, SECONDS), "no thread is free"


def test_progress_gives_a_read_time(tier):
    ended = []
    began = time.monotonic()
    start(tier, KEYS[:3] * 5, 2.0, ended)
    wait_until(lambda: ended)
    assert [block.key for block in ended[0]] == KEYS[:2]
    assert time.monotonic() - began >= 2.0 * 2 / 15


def test_routers_hear_of_files_that_come_and_go(tier):
    assert tier.take_changes() == (set(KEYS), set())
    assert tier.take_changes() == (set(), set())
    tier._files._path(KEYS[0]).unlink()
    assert not tier._files.read(KEYS[0], np.empty(SIZE, np.uint8))
    assert tier.take_changes() == (set(), {KEYS[0]})
    assert tier.published == set(KEYS[1:])
