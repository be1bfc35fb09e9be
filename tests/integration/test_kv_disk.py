"""Engines that keep prefixes on disk: two in one directory; a slow disk; one that vanishes."""

import os
import random
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import octavo
from octavo.engine.kv_disk.disk_tier import REFRESH_SECONDS
from octavo.engine.kv_disk.reads import MAX_DELAY
from tests.integration.conftest import SMALL
from tests.integration.harness import wait_until

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 16
LENGTH, LONG = 640, 1600
SPACE = 0.12
"""GiB: less than what `test_two_engines_share_a_directory` writes."""
NOISE_SECONDS = 0.3
"""Delay of a first token that a busy machine may add."""
BLKIO = Path("/sys/fs/cgroup/blkio")


class Answer(NamedTuple):
    """What came of a prompt."""

    tokens: list[int]
    cached: int
    first_seconds: float


def ask(server, number, length=LENGTH):
    """Return the answer to one of many random prompts."""
    chosen = random.Random(number)
    prompt = [chosen.randrange(1000, 40000) for _ in range(length)]
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "token_ids": True}
    with octavo.Client(server.address) as client:
        began, first, tokens = time.perf_counter(), 0.0, []
        for event in client.generate(prompt, **options).events():
            if isinstance(event, octavo.Delta):
                first = first or time.perf_counter() - began
                tokens += event.token_ids
            elif isinstance(event, octavo.Finished):
                return Answer(tokens, event.usage.cached_tokens, first)
    raise AssertionError("the stream ended early")


def counted(server, name, **labels):
    """Return a counter of the server's engine."""
    return server.metric(f"octavo_engine_{name}_total", port=server.metrics_port + 1, **labels)


def wait_written(server, prompts, length=LENGTH):
    """Wait until all blocks of some prompts are written."""

    def written():
        return counted(server, "disk_blocks", what="written") >= prompts * length // BLOCK_TOKENS

    wait_until(written, 30, "the last write")


@pytest.fixture
def serve(demo_model, launch):
    """Starts a server that keeps prefixes in a directory; None: in memory alone."""

    def start(disk, space=SPACE):
        tier = () if disk is None else ("--kv-disk", str(disk), "--kv-disk-space", str(space))
        return launch("serve", "--model", "demo", "--dtype", "float32", *SMALL, *tier).wait_ready()

    return start


def test_two_engines_share_a_directory(serve, tmp_path):
    alone = serve(None)
    expected = [ask(alone, number).tokens for number in range(12)]
    alone.stop()
    disk, sizes, done = tmp_path / "disk", [0], threading.Event()

    def watch():
        while not done.wait(0.01):
            sizes.append(sum(sizes_of(disk)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        one, two = serve(disk), serve(disk)
        assert ask(one, 0)[:2] == (expected[0], 0)
        wait_written(one, 1)
        time.sleep(REFRESH_SECONDS + 1)
        assert ask(two, 0)[:2] == (expected[0], LENGTH - BLOCK_TOKENS)
        with ThreadPoolExecutor(2) as pool:  # both write at once, some of it the same
            mine = pool.map(lambda number: ask(one, number).tokens, range(1, 7))
            others = pool.map(lambda number: ask(two, number).tokens, range(8, 2, -1))
            assert [*mine] == expected[1:7]
            assert [*others] == expected[8:2:-1]
        for number in range(9, 11):  # killed in mid-write
            before, victim = counted(one, "disk_blocks", what="written"), one
            with ThreadPoolExecutor(1) as pool:
                lost = pool.submit(ask, victim, number)
                wait_until(lambda: counted(victim, "disk_blocks", what="written") > before)  # noqa: B023
                (engine,) = victim.children()
                engine.kill()
                with pytest.raises((octavo.Error, AssertionError)):
                    lost.result()
            victim.stop()
            one = serve(disk)
            assert ask(two, number).tokens == ask(one, number).tokens == expected[number]
        assert ask(one, 11).tokens == expected[11]
        assert counted(one, "disk_blocks", what="written") > 0
    finally:
        done.set()
        watcher.join()
    assert SPACE * 0.8 < max(sizes) / (1 << 30) <= SPACE


def sizes_of(disk):
    """Yield the sizes of a directory's files."""
    for path in disk.rglob("*.kv*"):
        with suppress(FileNotFoundError):
            yield path.stat().st_size


def test_a_request_goes_to_the_engine_with_its_prefix_on_disk(demo_model, launch, tmp_path):
    flags = ("engine", "--model", "demo", *SMALL)
    tier = ("--kv-disk", str(tmp_path / "disk"))

    def answer(*engines):
        for engine in engines:
            engine.wait_ready()
        addresses = [flag for engine in engines for flag in ("--engine", engine.address)]
        return ask(launch("router", *addresses).wait_ready(), 0)

    first = launch(*flags, *tier)
    assert answer(first).cached == 0
    wait_until(lambda: len([*sizes_of(tmp_path / "disk")]) >= LENGTH // BLOCK_TOKENS)
    first.stop()
    assert answer(launch(*flags), launch(*flags, *tier)).cached == LENGTH - BLOCK_TOKENS


@contextmanager
def throttled(server, disk, bytes_per_second):
    """Let a server read at most some bytes per second from the disk of a directory."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    ours = next((line.split(":")[2] for line in lines if line.split(":")[1] == "blkio"), None)
    group = BLKIO / (ours or "").strip("/") / f"octavo-test-{os.getpid()}"
    device = disk.stat().st_dev
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no blkio cgroup: {error}")
    try:
        limit = f"{os.major(device)}:{os.minor(device)} {int(bytes_per_second)}"
        try:
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        except OSError as error:
            pytest.skip(f"the disk cannot be throttled: {error}")
        for child in server.children():
            (group / "cgroup.procs").write_text(str(child.pid))
        yield
    finally:
        server.stop()
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def forget_pages(disk):
    """Have the files of a directory read from its disk, not from memory."""
    for path in disk.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def filled(serve, tmp_path):
    """A directory with the prefixes of prompts 0 to 4, and how they were answered."""
    server, disk = serve(tmp_path / "disk", 1), tmp_path / "disk"
    answers = [ask(server, number, LONG) for number in range(5)]
    wait_written(server, 5, LONG)
    server.stop()
    forget_pages(disk)
    return disk, answers


def test_a_slow_disk_costs_a_tenth_at_most(serve, filled):
    disk, answers = filled
    computing = statistics.median(answer.first_seconds for answer in answers)
    server = serve(disk, 1)
    with throttled(server, disk, sum(sizes_of(disk)) / 5 / computing / 10):
        ask(server, 9, LONG)  # measures the rate of prefill
        for number, expected in enumerate(answers):
            answer = ask(server, number, LONG)
            assert answer.tokens == expected.tokens
            limit = (1 + MAX_DELAY) * computing + NOISE_SECONDS
            assert answer.first_seconds < limit
        assert counted(server, "late_disk_reads") > 0


def test_a_directory_that_is_removed_in_mid_read_costs_a_tenth_at_most(serve, filled):
    disk, answers = filled
    computing = statistics.median(answer.first_seconds for answer in answers)
    server = serve(disk, 1)
    with throttled(server, disk, sum(sizes_of(disk)) / 5 / computing * 2):
        ask(server, 9, LONG)
        wait_written(server, 1, LONG)  # or it writes into what is removed
        threading.Timer(computing / 4, shutil.rmtree, [disk]).start()
        answer = ask(server, 0, LONG)
        assert answer.tokens == answers[0].tokens
        assert answer.cached < LONG - BLOCK_TOKENS
        assert answer.first_seconds < (1 + MAX_DELAY) * computing + NOISE_SECONDS
        assert ask(server, 1, LONG).tokens == answers[1].tokens
