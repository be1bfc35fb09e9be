"""Threads of OpenMP's pool run on their own cores, as Linux reports."""

import os
import threading
from pathlib import Path

import pytest

from octavo.kernels.cpu import build
from octavo.kernels.cpu.native import NativeKernels

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None or len(os.sched_getaffinity(0)) < 2,
    reason="needs a C++ compiler and two CPUs",
)
FIRST, SECOND = sorted(os.sched_getaffinity(0))[:2] if len(os.sched_getaffinity(0)) > 1 else (0, 0)


def tasks():
    """Return this process's threads."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def pin(kernels, places):
    """Pin in a new thread with its own pool; return the outcome and the threads' CPUs."""
    outcome = []
    before = tasks()

    def run():
        done = kernels.pin_threads(places)
        new = tasks() - before
        outcome.extend([done, sorted(tuple(os.sched_getaffinity(task)) for task in new)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome


def test_each_thread_has_its_own_core():
    assert pin(NativeKernels(), [(SECOND,), (FIRST,)]) == [True, [(FIRST,), (SECOND,)]]


def test_a_core_may_have_several_cpus():
    both = (FIRST, SECOND)
    assert pin(NativeKernels(), [both, (SECOND,)]) == [True, [both, (SECOND,)]]


def test_no_places_are_no_pins():
    assert pin(NativeKernels(), [])[0] is False


def test_cpus_that_are_not_there_are_no_error():
    assert pin(NativeKernels(), [(FIRST,), (5000,)])[0] is False
