"""A process's share of its machine, from the files of control groups."""

import math

import psutil
import pytest

import octavo.common.placement
from octavo.common.placement import Placement
from octavo.common.resources import Memory, OomKills, cpu_quota, memory, oom_kills
from tests.common.machines import GIB, Machine

MIB = 1 << 20
V2 = "31 23 0:28 {shown} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 31 0:30 {shown} /sys/fs/cgroup/{kind} rw,nosuid - cgroup cgroup rw,{kind}\n"


@pytest.fixture
def system(tmp_path):
    """Write a system's files, by path; return its root."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


@pytest.fixture
def container(system):
    """Return a system of version 2 whose only visible group has these files."""

    def write(**files: str):
        group = {f"sys/fs/cgroup/{name.replace('_', '.', 1)}": text for name, text in files.items()}
        mounts = "22 1 8:1 / / rw - ext4  rw\n" + V2.format(shown="/")
        return system({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": mounts, **group})

    return write


def test_without_limits_it_is_the_machines(tmp_path, container):
    machine = psutil.virtual_memory().total
    free = container(memory_max="max\n", memory_current=f"{9 * MIB}\n", cpu_max="max 100000\n")
    for root in (tmp_path / "of no Linux", free):
        assert memory(root).total == machine
        assert memory(root).available > 0
        assert cpu_quota(root) == math.inf


def test_a_containers_limits(container):
    root = container(
        memory_max=f"{100 * MIB}\n",
        memory_current=f"{70 * MIB}\n",
        memory_stat=f"anon {45 * MIB}\ninactive_file {20 * MIB}\nactive_file {5 * MIB}\n",
        cpu_max="50000 100000\n",
    )
    assert memory(root).total == 100 * MIB
    assert memory(root).available == 50 * MIB
    assert cpu_quota(root) == 0.5


def test_what_is_over_a_limit_leaves_nothing(container):
    root = container(memory_max="max", memory_high=f"{MIB}", memory_current=f"{2 * MIB}")
    assert (memory(root).total, memory(root).available) == (MIB, 0)


def test_the_groups_above_limit_too(system):
    group = "sys/fs/cgroup/engines.slice"
    root = system(
        {
            "proc/self/cgroup": "0::/engines.slice/one.service\n",
            "proc/self/mountinfo": V2.format(shown="/"),
            f"{group}/memory.max": f"{300 * MIB}\n",
            f"{group}/memory.current": f"{290 * MIB}\n",
            f"{group}/cpu.max": "100000 100000\n",
            f"{group}/one.service/memory.max": f"{200 * MIB}\n",
            f"{group}/one.service/memory.current": f"{50 * MIB}\n",
            f"{group}/one.service/cpu.max": "max 100000\n",
            "sys/fs/cgroup/others.slice/memory.max": "1\n",
            "sys/fs/cgroup/others.slice/cpu.max": "1 100000\n",
        }
    )
    assert memory(root).total == 200 * MIB
    assert memory(root).available == 10 * MIB
    assert cpu_quota(root) == 1


@pytest.mark.parametrize(
    ("shown", "below"), [("/", "docker/4f2a/"), ("/docker/4f2a", ""), ("/docker/other", "")]
)
def test_version_1(system, shown, below):
    """The mount may show all groups, as on a host, or one group, as in a container."""
    group = f"sys/fs/cgroup/memory/{below}"
    mounts = [V1.format(shown=shown, kind=kind) for kind in ("memory", "cpu,cpuacct", "cpuset")]
    root = system(
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/4f2a\n2:memory:/docker/4f2a\n0::/\n",
            "proc/self/mountinfo": "".join(mounts),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{80 * MIB}\n",
            f"{group}memory.limit_in_bytes": f"{100 * MIB}\n",
            f"{group}memory.usage_in_bytes": f"{80 * MIB}\n",
            f"{group}memory.stat": f"inactive_file 0\ntotal_inactive_file {30 * MIB}\n",
            f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_quota_us": "25000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_period_us": "50000\n",
        }
    )
    assert memory(root).total == 100 * MIB
    assert memory(root).available == 50 * MIB
    assert cpu_quota(root) == 0.5


def test_an_engine_beside_others_has_its_share(container, monkeypatch):
    """Engines share the quota, the container's memory, and the node's."""
    placement = Placement((2,), node=1, engines=4, engines_on_node=2)
    monkeypatch.setattr(octavo.common.placement, "_current", placement)
    files = {"memory_max": f"{16 * GIB}", "memory_current": f"{4 * GIB}"}
    root = container(cpu_max="600000 100000", **files)
    machine = Machine(
        cores=("0", "1", "2", "3"), nodes={0: ("0-1", 64), 1: ("2-3", 6)}, allowed="2"
    ).write(root)
    assert cpu_quota(machine) == 1.5
    assert memory(machine).total == 3 * GIB  # half of the node's
    assert memory(machine).available == 1.5 * GIB
    roomy = Placement((0,), node=0, engines=4, engines_on_node=2)
    monkeypatch.setattr(octavo.common.placement, "_current", roomy)
    (root / "proc/self/status").write_text("Cpus_allowed_list: 0\n")
    assert memory(machine) == Memory(4 * GIB, 3 * GIB)  # a quarter of the container's


def test_kills_of_version_2(container):
    root = container(memory_events="low 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert oom_kills(root) == OomKills(group=3, machine=None)


def test_kills_of_version_1(system):
    root = system(
        {
            "proc/self/cgroup": "4:memory:/docker/4f2a\n",
            "proc/self/mountinfo": V1.format(shown="/", kind="memory"),
            "proc/vmstat": "nr_free_pages 17\noom_kill 5\n",
            "sys/fs/cgroup/memory/docker/4f2a/memory.oom_control": "under_oom 0\noom_kill 2\n",
            "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 8\n",
        }
    )
    assert oom_kills(root) == OomKills(group=2, machine=5)


def test_kills_where_nothing_can_be_read(tmp_path):
    assert oom_kills(tmp_path) == OomKills(None, None)


@pytest.mark.parametrize(
    ("before", "now", "rose"),
    [
        ((3, 7), (4, 8), True),
        ((3, 7), (3, 8), False),  # another group's
        ((None, 7), (None, 7), False),
        ((None, 7), (None, 8), None),  # possibly another process's
        ((None, None), (None, None), None),
        ((3, None), (None, None), None),
    ],
)
def test_whether_one_was_killed(before, now, rose):
    assert OomKills(*now).rose_since(OomKills(*before)) is rose
