"""A pausable call runs only while its caller waits, and ends where it is paused."""

import threading
import time

import pytest

from octavo.common.pausable import PausableCall, pause_point


def test_a_call_pauses_when_its_time_is_up_and_continues():
    seen = []

    def count():
        for number in range(4):
            pause_point()
            seen.append(number)
        return "done"

    call = PausableCall(count, "counter")
    assert call.run(0) == []
    assert seen == []
    for expected in range(3):
        assert call.run(0) == []
        assert seen == [*range(expected + 1)]
        time.sleep(0.01)
        assert seen == [*range(expected + 1)], "it runs while it is paused"
    assert call.run(0) == ["done"]
    assert PausableCall(count, "counter").run(60) == ["done"]


def test_an_error_is_raised_to_the_caller():
    def fail():
        pause_point()
        raise ValueError("no")

    call = PausableCall(fail, "fails")
    assert call.run(0) == []
    with pytest.raises(ValueError, match="no"):
        call.run(0)
    call.end()


def test_a_paused_call_ends_without_going_on():
    seen = []

    def work():
        try:
            pause_point()
            seen.append("went on")
        except Exception:  # noqa: BLE001 - as a model's code may
            seen.append("caught")
        finally:
            seen.append("ended")

    call = PausableCall(work, "ends")
    call.end()
    assert call.run(0) == []
    call.end()
    assert seen == ["ended"]
    assert "ends" not in {thread.name for thread in threading.enumerate()}
    call.end()


def test_a_pause_point_elsewhere_does_nothing():
    pause_point()
    inner = []
    call = PausableCall(lambda: inner.append(threading.current_thread().name), "inner")
    assert call.run(0) == [None]
    assert inner == ["inner"]
