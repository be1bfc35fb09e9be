"""Old kernels and older versions' compiled steps are removed, and nothing that is needed."""

import os
import time

import pytest

from octavo.engine.cache_cleanup import DAY, STEPS, prune
from octavo.kernels.cpu import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def built(cache):
    """Create a build of the kernels whose last load was some days ago."""

    def leave_one(name, days):
        return touch(cache / build.LIBRARY.format(name), days)

    return leave_one


def touch(file, days):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    moment = time.time() - days * DAY
    os.utime(file, (moment, moment))
    return file


def test_what_was_not_loaded_for_a_month_goes(built):
    old, late = built("old", 31), built("late", 29)
    prune()
    assert not old.exists()
    assert late.exists()


def test_what_has_two_newer_ones_goes(built):
    kept = [built("new", 0), built("one to go back to", 3)]
    gone = [built("superseded", 4), built("and so too", 5)]
    prune()
    assert all(library.exists() for library in kept)
    assert not any(library.exists() for library in gone)


def test_what_takes_turns_stays(built):
    kept = [built(name, 0.9) for name in "abcd"]
    prune()
    assert all(library.exists() for library in kept)


def test_kernels_that_are_loaded_stay(built):
    library = built("loaded", 100)
    assert build._hold(library)
    assert time.time() - library.stat().st_mtime < DAY
    built("loaded", 100)
    prune()
    assert library.exists()
    assert not build._hold(library.with_name("gone"))


def test_compiled_steps_of_an_older_version_go_once_it_is_not_used(cache):
    use = touch(cache / STEPS / "a step" / "use.json", 0.5)
    os.utime(use.parent, (0, 0))
    os.utime(cache / STEPS, (0, 0))
    prune()
    assert use.exists()
    touch(use, 1.5)
    prune()
    assert not (cache / STEPS).exists()
    prune()
