"""The topology of many kinds of machines, and of this one."""

import os

import psutil
import pytest

from octavo.common.topology import Core, format_list, parse_list, read_nodes
from tests.common.machines import GIB, Machine, one_node, two_sockets


def by_node(nodes):
    return {node.number: [core.cpus for core in node.cores] for node in nodes}


def test_two_sockets_with_two_threads_a_core(tmp_path):
    first, second = read_nodes(two_sockets().write(tmp_path))
    assert [core.cpus for core in first.cores] == [(cpu, cpu + 64) for cpu in range(32)]
    assert [core.cpus for core in second.cores] == [(cpu, cpu + 64) for cpu in range(32, 64)]
    assert (first.number, first.total, first.available) == (0, 256 * GIB, 128 * GIB)


def test_a_cpuset_of_a_part_of_one_node(tmp_path):
    """The process may use one hardware thread of the last core."""
    machine = two_sockets(allowed="36-38,100-101", memory_allowed="1")
    (node,) = read_nodes(machine.write(tmp_path))
    assert (node.number, by_node([node])[1]) == (1, [(36, 100), (37, 101), (38,)])


def test_cores_whose_memory_is_not_allowed_use_the_nearest(tmp_path):
    (node,) = read_nodes(two_sockets(memory_allowed="1").write(tmp_path))
    assert (node.number, len(node.cores)) == (1, 64)


def test_nodes_without_memory_and_nodes_without_cores(tmp_path):
    """Node 1 has no memory and is nearer to node 2 than to node 0; node 3 has memory alone."""
    machine = Machine(
        cores=("0", "1", "2"),
        nodes={0: ("0", 8), 1: ("1", 0), 2: ("2", 8), 3: ("", 64)},
        distances={1: "30 10 20 40"},
    )
    assert by_node(read_nodes(machine.write(tmp_path))) == {0: [(0,)], 2: [(1,), (2,)]}


def test_cpus_that_are_offline_are_left_out(tmp_path):
    """The second threads are offline, as after `nosmt`, and a whole core."""
    (first, _) = read_nodes(two_sockets(offline="3,64-127").write(tmp_path))
    assert by_node([first])[0] == [(cpu,) for cpu in range(32) if cpu != 3]


def test_intels_hybrid_cores(tmp_path):
    cores = ("0,1", "2,3", "4", "5", "6", "7")
    machine = Machine(cores=cores, nodes={0: ("0-7", 16)}, fast="0-3")
    (node,) = read_nodes(machine.write(tmp_path))
    assert node.fast_cores == (Core((0, 1)), Core((2, 3)))
    assert len(node.cores) == 6


def test_only_slow_cores_are_better_than_none(tmp_path):
    machine = one_node(8, fast="0-3", allowed="4-7")
    (node,) = read_nodes(machine.write(tmp_path))
    assert [core.cpus for core in node.fast_cores] == [(4,), (5,), (6,), (7,)]


@pytest.mark.parametrize(
    ("capacities", "fast"),
    [
        ((1024, 1024, 1024, 1024), 4),
        ((250, 250, 800, 1024), 2),
        ((250, 250, 800), 4),  # unknown for some cores
    ],
)
def test_arms_cores(tmp_path, capacities, fast):
    machine = one_node(4, capacities=dict(enumerate(capacities)))
    (node,) = read_nodes(machine.write(tmp_path))
    assert len(node.fast_cores) == fast


def test_a_node_is_known_without_cores_and_cores_without_nodes(tmp_path):
    """Some containers see less of sysfs."""
    bare = Machine(cores=(), nodes={}, allowed="2-3").write(tmp_path)
    (node,) = read_nodes(bare)
    assert [core.cpus for core in node.cores] == [(2,), (3,)]
    assert node.total == psutil.virtual_memory().total
    (node,) = read_nodes(tmp_path / "of no Linux")
    assert [core.cpus[0] for core in node.cores] == sorted(os.sched_getaffinity(0))


def test_this_machine():
    nodes = read_nodes()
    cpus = sorted(cpu for node in nodes for core in node.cores for cpu in core.cpus)
    assert cpus == sorted(os.sched_getaffinity(0))
    assert 0 < sum(node.available for node in nodes) <= sum(node.total for node in nodes)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("1,3-4,7-9", (1, 3, 4, 7, 8, 9))],
)
def test_lists(text, numbers):
    assert parse_list(f"{text}\n") == numbers
    assert format_list(reversed(numbers)) == text
