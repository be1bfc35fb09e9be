"""Old compiled steps and kernels go, and none that anybody needs."""

import json
import os
import time

import pytest

from octavo.common.models import cache as model_cache
from octavo.engine.compilation import cache_cleanup as upkeep
from octavo.kernels.cpu import build

DAY = 86_400
MODEL = {"model": "some", "dtype": "auto", "quantization": "none"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    return tmp_path / upkeep.FOLDER


@pytest.fixture
def make(folder):
    """Makes a compiled step that was loaded so many days ago."""

    def make_one(name, days, **made_of):
        step = model_cache.prepare(f"{upkeep.FOLDER}/{name}", lambda target, _: target.mkdir())
        upkeep.hold(step, MODEL | made_of).close()
        moment = time.time() - days * DAY
        os.utime(step / upkeep.USE, (moment, moment))
        return step

    return make_one


@pytest.fixture
def built(folder):
    """Leaves a build of the kernels that was loaded so many days ago."""

    def leave_one(name, days):
        library = folder.parent / build.LIBRARY.format(name)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        moment = time.time() - days * DAY
        os.utime(library, (moment, moment))
        return library

    return leave_one


def names(folder):
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_what_was_not_loaded_for_a_month_goes(make, folder):
    make("old", 31)
    make("late", 29, model="other")
    model_cache.prepare(f"{upkeep.FOLDER}/of an older version", lambda target, _: target.mkdir())
    upkeep.prune()
    assert names(folder) == {"late", "of an older version"}
    month = time.time() - 31 * DAY
    os.utime(folder / "of an older version", (month, month))
    upkeep.prune()
    assert names(folder) == {"late"}


def test_what_has_two_newer_ones_goes(make, folder):
    make("new", 0)
    make("one to go back to", 3)
    make("superseded", 4)
    make("and so too", 5)
    make("another type", 5, dtype="float32")
    make("another width", 5, quantization="int8")
    upkeep.prune()
    kept = {"new", "one to go back to", "another type", "another width"}
    assert names(folder) == kept


def test_what_takes_turns_stays(make, folder):
    for name in "abcd":
        make(name, 0.9)
    upkeep.prune()
    assert names(folder) == set("abcd")


def test_what_is_loaded_stays(make, folder):
    step = make("loaded", 100)
    with upkeep.hold(step, MODEL) as first, upkeep.hold(step, MODEL):
        long_ago = time.time() - 100 * DAY
        os.utime(step / upkeep.USE, (long_ago, long_ago))
        upkeep.prune()
        first.close()
        upkeep.prune()
        assert names(folder) == {"loaded"}
        assert json.loads((step / upkeep.USE).read_text()) == MODEL
    upkeep.prune()
    assert names(folder) == set()


def test_loading_is_noted(make, folder):
    step = make("back again", 100)
    upkeep.hold(step, MODEL).close()
    upkeep.prune()
    assert names(folder) == {"back again"}


def test_what_a_killed_compiler_left_goes_and_what_is_being_made_stays(folder):
    left = folder / f"{model_cache.UNFINISHED}killed"
    (left / "inductor").mkdir(parents=True)
    (folder / "of one that is gone.lock").touch()

    def compile_one(target, _):
        target.mkdir()
        upkeep.prune()  # as another process might
        assert {path.name for path in folder.iterdir()} == {
            f"{model_cache.UNFINISHED}made",
            "made.lock",
        }

    model_cache.prepare(f"{upkeep.FOLDER}/made", compile_one)
    assert [path.name for path in folder.iterdir()] == ["made"]


def test_kernels_go_as_steps_do(built):
    kept = [built("new", 0), built("one to go back to", 3)]
    gone = [built("superseded", 4), built("old", 31)]
    upkeep.prune()
    assert all(library.exists() for library in kept)
    assert not any(library.exists() for library in gone)


def test_kernels_that_are_loaded_stay(built):
    library = built("loaded", 100)
    assert build._hold(library)
    assert time.time() - library.stat().st_mtime < DAY
    built("loaded", 100)
    upkeep.prune()
    assert library.exists()
    assert not build._hold(library.with_name("gone"))


def test_a_step_that_is_gone_or_cannot_be_noted_is_not_held(tmp_path):
    assert upkeep.hold(tmp_path / "gone", MODEL) is None
