"""The number of compute threads, and their CPUs."""

import math

import pytest

from octavo.common.topology import read_nodes
from octavo.engine.startup.threads import choose_threads
from tests.common.machines import Machine, one_node, two_sockets


@pytest.fixture
def choose(tmp_path):
    """A function that chooses threads for a machine."""

    def choose(machine, quota=math.inf, given=None, **environment):
        variables = environment | ({"OMP_NUM_THREADS": str(given)} if given else {})
        nodes = read_nodes(machine.write(tmp_path))
        return choose_threads(nodes, quota, variables, given or 999)

    return choose


def test_a_thread_for_each_core_not_for_each_hardware_thread(choose):
    threads = choose(two_sockets(allowed="0-31,64-95"))
    assert (threads.count, threads.nodes) == (32, (0,))
    assert threads.places == tuple((cpu, cpu + 64) for cpu in range(32))


def test_all_nodes_if_nothing_binds_it_to_one(choose):
    assert choose(two_sockets()).count == 64


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (7, 7), (8, 7), (64, 63)])
def test_of_many_cores_without_second_threads_one_is_left(choose, cores, count):
    threads = choose(one_node(cores))
    assert threads.count == count
    assert threads.places == (
        () if count == 1 else tuple((c,) for c in range(cores - count, cores))
    )


def test_fast_cores_alone_compute(choose):
    cores = (*(f"{2 * i},{2 * i + 1}" for i in range(8)), *map(str, range(16, 32)))
    threads = choose(Machine(cores=cores, nodes={0: ("0-31", 32)}, fast="0-15"))
    assert threads.count == 8
    assert threads.places == tuple((2 * i, 2 * i + 1) for i in range(8))


@pytest.mark.parametrize(
    ("quota", "count"), [(0.5, 1), (1.5, 1), (1.9, 2), (4, 4), (4.5, 4), (16, 15)]
)
def test_a_quota_caps_the_threads_and_unpins_them(choose, quota, count):
    threads = choose(two_sockets(), quota)
    assert (threads.count, threads.places) == (count, ())


def test_a_quota_for_all_cores_is_none(choose):
    assert len(choose(one_node(4), 4).places) == 4


@pytest.mark.parametrize(
    ("given", "pinned"),
    [(8, True), (7, True), (6, False), (1, False), (16, False)],
)
def test_as_many_threads_as_openmp_is_told(choose, given, pinned):
    threads = choose(one_node(8), given=given)
    assert (threads.count, bool(threads.places)) == (given, pinned)


def test_openmp_may_pin_them_itself(choose):
    threads = choose(one_node(4), OMP_PROC_BIND="true")
    assert (threads.count, threads.places) == (4, ())
