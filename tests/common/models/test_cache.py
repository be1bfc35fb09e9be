"""The cache prepares each model once, completely or not at all."""

import multiprocessing
import os
from pathlib import Path

import pytest

from octavo.common.models import cache as model_cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_failed_preparation_leaves_nothing(cache):
    def make(target, stage):
        (target.parent / "download").touch()
        target.mkdir()
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        model_cache.prepare("some-1.5", make)
    assert list(cache.iterdir()) == []


def test_what_is_made_stays_and_the_rest_goes(cache):
    def make(target, stage):
        (target.parent / "download").touch()
        target.mkdir()
        (target / "config.json").touch()

    assert model_cache.prepare("some-1.5", make) == cache / "some-1.5"
    assert [path.name for path in cache.iterdir()] == ["some-1.5"]
    assert [path.name for path in (cache / "some-1.5").iterdir()] == ["config.json"]


def _prepare(cache: str, seen: str) -> None:
    """Prepare a fake model that leaves a trace, in its own process."""
    os.environ["OCTAVO_CACHE_DIR"] = cache

    def make(target, stage):
        with Path(seen).open("a") as trace:
            trace.write("made\n")
        target.mkdir()

    assert model_cache.prepare("some", make).is_dir()


def test_processes_that_race_prepare_once(cache, tmp_path):
    seen = tmp_path / "seen"
    spawn = multiprocessing.get_context("spawn")
    racers = [spawn.Process(target=_prepare, args=(str(cache), str(seen))) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert seen.read_text() == "made\n"
