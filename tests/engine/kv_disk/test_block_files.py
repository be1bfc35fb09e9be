"""Files of blocks: whole or absent, within a limit, shared by engines."""

import os
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from octavo.engine.kv_disk.block_files import BlockFiles

SIZE = 1000


def key_of(number):
    return number.to_bytes(1) * 32


def block(number):
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def open_files(root, limit=1 << 30, model="a"):
    return BlockFiles(root, model, SIZE, limit)


def read(files, number):
    contents = np.zeros(SIZE, np.uint8)
    return contents if files.read(key_of(number), contents) else None


def paths(root):
    return sorted(path for path in root.rglob("*.kv"))


def test_blocks_outlive_their_writer(tmp_path):
    writer = open_files(tmp_path / "new")
    for number in range(5):
        writer.write(key_of(number), block(number))
    reader = open_files(tmp_path / "new")
    assert reader.held == {key_of(number) for number in range(5)}
    assert all((read(reader, number) == block(number)).all() for number in range(5))
    assert read(reader, 9) is None


def test_only_the_owner_may_read_them(tmp_path):
    open_files(tmp_path / "new").write(key_of(1), block(1))
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        if path.name != "lock":
            assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda _: b"",
        lambda data: data[:10],
        lambda data: b"?" + data[1:],
    ],
)
def test_a_damaged_file_is_deleted_and_not_read(tmp_path, damage):
    files = open_files(tmp_path)
    files.write(key_of(1), block(1))
    (path,) = paths(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert read(files, 1) is None
    assert files.held == set()
    assert paths(tmp_path) == []


def test_engines_see_each_others_files(tmp_path):
    one, other = open_files(tmp_path), open_files(tmp_path)
    one.write(key_of(1), block(1))
    one.write(key_of(2), block(2))
    assert other.held == set()
    other.refresh()
    assert other.held == {key_of(1), key_of(2)}
    paths(tmp_path)[0].unlink()
    other.refresh()
    assert other.held == {key_of(2)}


def test_models_do_not_see_each_others_files(tmp_path):
    open_files(tmp_path, model="a").write(key_of(1), block(1))
    other = open_files(tmp_path, model="b")
    assert other.held == set()
    assert read(other, 1) is None


def test_the_least_recently_used_go_at_the_limit_whatever_their_model(tmp_path):
    limit = 20 * SIZE
    first = open_files(tmp_path, limit, "a")
    for number in range(4):
        first.write(key_of(number), block(number))
        os.utime(first._path(key_of(number)), (number, number))  # older than all that follow
    assert (read(first, 0) == block(0)).all()  # used now
    second = open_files(tmp_path, limit, "b")
    for number in range(100, 140):
        second.write(key_of(number), block(number))
        assert sum(path.stat().st_size for path in paths(tmp_path)) <= limit
    assert len(second.held) == len(paths(tmp_path)) >= 15
    first.refresh()
    assert first.held == set()
    assert (read(second, 139) == block(139)).all()


def test_ten_writers_keep_within_the_limit(tmp_path):
    limit = 200 * SIZE
    writers = [open_files(tmp_path, limit) for _ in range(10)]
    for number in range(500):
        key = number.to_bytes(2) * 16
        writers[number % 10].write(key, block(number))
        assert sum(path.stat().st_size for path in paths(tmp_path)) <= limit
    writers[0].refresh()
    assert len(writers[0].held) == len(paths(tmp_path)) > 170


def test_a_writer_killed_at_any_moment_leaves_whole_files(tmp_path):
    """After 8 kills during writes, whole files are right and the others are deleted."""
    program = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from octavo.engine.kv_disk.block_files import BlockFiles\n"
        "files = BlockFiles(Path(sys.argv[1]), 'a', 4_000_000, 1 << 30)\n"
        "print('ready', flush=True)\n"
        "for n in range(1 << 30):\n"
        "    files.write(bytes([n % 8]) * 32, np.full(4_000_000, n % 8, np.uint8))\n"
    )
    for kill in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            writer.stdout.readline()
            time.sleep(0.005 * kill)
            writer.kill()
    files = BlockFiles(tmp_path, "a", 4_000_000, 1 << 30)
    assert files.held
    for key in files.held.copy():
        contents = np.empty(4_000_000, np.uint8)
        assert files.read(key, contents)
        assert (contents == key[0]).all()
    left = [path for path in tmp_path.glob("*/*/*") if path.suffix != ".kv"]
    for path in left:
        os.utime(path, (0, 0))
    BlockFiles(tmp_path, "a", 4_000_000, 1 << 30)
    assert not any(path.exists() for path in left)


def test_files_of_others_stay(tmp_path):
    others = [
        tmp_path / "notes.txt",
        tmp_path / "photos/26/report.pdf",
        tmp_path / "photos/26/tmpabc",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"somebody's")
        os.utime(path, (0, 0))
    files = open_files(tmp_path, 5 * SIZE)
    for number in range(20):
        files.write(key_of(number), block(number))
    assert all(path.read_bytes() == b"somebody's" for path in others)


def test_a_disk_that_cannot_be_written_to_is_an_error_and_leaves_nothing(tmp_path):
    files = open_files(tmp_path)
    folder = files._path(key_of(1)).parent
    folder.write_bytes(b"a file in the folder's place")
    with pytest.raises(OSError, match="exists"):
        files.write(key_of(1), block(1))
    assert files.held == set()
    assert read(files, 1) is None
