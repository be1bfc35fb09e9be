"""Engines' cores and memory, as Linux reports them. Each test binds its own process."""

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from octavo.common import placement
from octavo.common.placement import Placement

CPU = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def bound(*arguments):
    """Bind a child process to CPUs; return its log, memory policy, and a new thread's CPUs."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_bind, arguments)


def _bind(place, number=None):
    if number is not None:
        placement.SET_MEMPOLICY = {} if number < 0 else dict.fromkeys(["x86_64", "aarch64"], number)
    with capture_logs() as logs:
        placement.bind(place)
    cpus = []
    thread = threading.Thread(target=lambda: cpus.extend(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert placement.current() == place
    policy = Path("/proc/self/numa_maps").read_text().split()[1]
    return logs, policy, cpus


def test_threads_run_on_the_cores_and_memory_is_the_nodes():
    logs, policy, cpus = bound(Placement((CPU,), 0, binds_memory=True))
    assert (logs, cpus) == ([], [CPU])
    assert policy == "bind:0"


def test_memory_of_the_only_node_is_not_bound():
    logs, policy, cpus = bound(Placement((CPU,), 0))
    assert (logs, policy, cpus) == ([], "default", [CPU])


@pytest.mark.parametrize(
    ("node", "number", "error", "hint"),
    [
        (900, None, "Invalid argument", False),  # no such node
        (0, -1, "its number is unknown on", False),
        (0, 10_000, "Function not implemented", False),
    ],
)
def test_memory_that_cannot_be_bound_is_a_warning(node, number, error, hint):
    (line,), policy, cpus = bound(Placement((CPU,), node, binds_memory=True), number)
    assert "the engine's memory is not bound to its NUMA node" in line["event"]
    assert error in line["error"]
    assert ("hint" in line) is hint
    assert (policy, cpus) == ("default", [CPU])


def test_in_a_container_the_warning_says_what_to_do(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(placement, "_set_mempolicy", refuse)
    monkeypatch.setattr(placement, "_current", None)
    before = os.sched_getaffinity(0)
    with capture_logs() as logs:
        placement.bind(Placement(tuple(before), 0, binds_memory=True))
    assert logs[0]["error"] == "set_mempolicy: Operation not permitted"
    assert logs[0]["hint"] == "in a container, add the capability SYS_NICE"


def test_it_is_shown_in_errors():
    assert str(Placement((0, 1, 2, 8), 3)) == "node 3, CPUs 0-2,8"
