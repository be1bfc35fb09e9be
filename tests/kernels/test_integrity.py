"""A cached file is loaded only if it is unchanged and no other user could write it."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels import integrity
from octavo.kernels.cpu import build
from octavo.kernels.integrity import DamagedFileError, UntrustedFileError

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
ROOT = Path(__file__).parents[2]


CHANGES = {
    "cut in half": lambda contents: contents[: len(contents) // 2],
    "a flipped byte": lambda contents: contents[:99] + bytes([contents[99] ^ 1]) + contents[100:],
    "empty": lambda _: b"",
}
damaged = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def replace(path, change):
    """Replace a file by a changed copy; the original may be loaded."""
    contents = path.read_bytes()
    path.unlink()
    path.write_bytes(change(contents))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 20)
    return path


@damaged
def test_a_seal_holds_for_the_contents_it_was_made_of(file, change):
    with pytest.raises(DamagedFileError):
        integrity.verify_seal(file)
    integrity.seal(file)
    integrity.verify_seal(file)
    replace(file, change)
    with pytest.raises(DamagedFileError, match=str(file)):
        integrity.verify_seal(file)


def test_what_others_can_write_is_not_trusted(file):
    integrity.check_trusted(file, file.parent)
    file.chmod(0o664)  # a group of this process
    integrity.check_trusted(file)
    file.chmod(0o646)
    with pytest.raises(UntrustedFileError, match="other users can write"):
        integrity.check_trusted(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_others_own_is_not_trusted(file):
    os.chown(file, 12345, -1)
    with pytest.raises(UntrustedFileError, match="another user"):
        integrity.check_trusted(file)
    os.chown(file, 0, 12345)
    integrity.check_trusted(file)
    file.chmod(0o664)
    with pytest.raises(UntrustedFileError, match="other users can write"):
        integrity.check_trusted(file)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A library as `build` leaves it, compiled from a line of C."""
    path = tmp_path_factory.mktemp("built") / "library.so"
    source = path.with_suffix(".cpp")
    source.write_text('extern "C" int octavo_answer() { return 42; }')
    subprocess.run([build.find_compiler(), "-shared", "-fPIC", "-o", path, source], check=True)
    integrity.seal(path)
    return path


@needs_compiler
def test_a_sealed_library_can_be_loaded(built):
    assert ctypes.CDLL(str(built)).octavo_answer() == 42


@pytest.fixture
def cached(tmp_path, monkeypatch, built):
    """The kernels' path in a new cache, and a fast fake compiler."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda _, path: shutil.copy(built, path))
    build.load_compiled()
    return next((tmp_path / "kernels").iterdir())


@needs_compiler
@damaged
def test_damaged_kernels_are_compiled_again(cached, built, change, caplog):
    replace(cached, change)
    with caplog.at_level(logging.WARNING):
        build.load_compiled()
    assert str(cached) in caplog.text
    assert cached.read_bytes() == built.read_bytes()


@needs_compiler
def test_kernels_that_others_can_write_are_compiled_again(cached, caplog):
    cached.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        build.load_compiled()
    assert f"other users can write to {cached}" in caplog.text
    assert not cached.stat().st_mode & 0o022


@needs_compiler
def test_kernels_in_a_directory_that_others_can_write_are_not_loaded(cached):
    cached.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError, match=str(cached.parent)):
        build.load_compiled()


@needs_compiler
def test_what_make_has_compiled_is_taken(tmp_path, monkeypatch, built):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "build")
    monkeypatch.setattr(build, "compile_library", lambda *_: pytest.fail("compiled again"))
    kept = build._library_path(build.find_compiler())
    build.PREBUILT.mkdir()
    shutil.copy(built, build.PREBUILT / kept.name)
    # As make runs it, without packages: the library exists, so nothing is compiled.
    script = [sys.executable, "-I", "-S", ROOT / "kernels" / "cpu" / "prebuild.py", build.PREBUILT]
    subprocess.run(script, check=True)
    assert (build.PREBUILT / kept.name).read_bytes() == built.read_bytes()
    assert build.load_compiled()._name == str(kept)
    integrity.verify_seal(kept)


@needs_compiler
@pytest.mark.slow
def test_a_process_survives_damaged_kernels(tmp_path):
    """Load the real kernels in a new process: a truncated library would end it with SIGBUS."""
    kept = build._library_path(build.find_compiler())
    copy = tmp_path / "kernels" / kept.name
    copy.parent.mkdir(mode=0o755)
    shutil.copy(kept, copy)
    replace(copy, CHANGES["cut in half"])
    environment = os.environ | {"OCTAVO_CACHE_DIR": str(tmp_path)}
    script = "from octavo.kernels import cpu; assert cpu.warning is None"
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0
    integrity.verify_seal(copy)
