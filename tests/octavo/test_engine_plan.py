"""The number of engines that `octavo serve` starts, and their nodes."""

import math

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from octavo.cli import engine_plan
from octavo.cli.engine_plan import Machine, has_gpu, plan_engines, weights_bytes
from octavo.cli.running import StartError
from octavo.cli.serve_settings import ServeSettings
from octavo.common.placement import Placement
from octavo.common.settings import SettingsError
from octavo.common.topology import parse_list, read_nodes
from octavo.engine.settings import EngineSettings
from tests.common import machines
from tests.common.machines import GIB, one_node, two_sockets


@pytest.fixture
def plan(tmp_path):
    """Plan the engines of a simulated machine."""

    def plan(choice, machine, **changes):
        facts = {"quota": math.inf, "memory": 512 * GIB, "weights": 16 * GIB, "on_gpu": False}
        nodes = read_nodes(machine.write(tmp_path))
        return plan_engines(choice, Machine(nodes, **{**facts, **changes}))

    return plan


def test_by_default_a_laptop_has_one_engine(plan):
    assert ServeSettings.load().engines_per_node == "auto"
    assert plan("auto", one_node(8)) == []


def test_by_default_each_socket_has_an_engine(plan):
    cpus = parse_list("0-31,64-95"), parse_list("32-63,96-127")
    assert plan("auto", two_sockets()) == [
        Placement(cpus[node], node, binds_memory=True, engines=2) for node in (0, 1)
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"on_gpu": True}, "there may be a GPU"),
        ({"quota": 8}, "the CPU quota is 8 of 64 cores"),
        ({"weights": 90 * GIB}, "more than a third of a node's memory"),
        ({"memory": 64 * GIB, "weights": 16 * GIB}, "more than a third of a node's memory"),
    ],
)
def test_by_default_one_engine_has_all_nodes_where_more_would_not_fit(plan, changes, reason):
    with capture_logs() as logs:
        assert plan("auto", two_sockets(), **changes) == []
    (line,) = logs
    assert reason in line["reason"]


def test_no_reason_is_logged_for_a_single_node(plan):
    with capture_logs() as logs:
        assert plan("auto", one_node(8), on_gpu=True) == []
    assert not logs


def test_off_is_one_engine_for_all_nodes(plan):
    assert plan("off", two_sockets()) == []


def test_one_for_each_node_whatever_the_default(plan):
    assert len(plan(1, two_sockets(), quota=8)) == 2
    assert plan(1, one_node(8)) == []


def test_engines_of_a_node_divide_its_cores(plan):
    """Its memory is not bound, as there is no other node."""
    shared = {"engines": 2, "engines_on_node": 2}
    assert plan(2, one_node(5)) == [
        Placement((0, 1), 0, **shared),
        Placement((2, 3, 4), 0, **shared),
    ]


def test_engines_of_a_hybrid_have_cores_of_both_kinds(plan):
    cores = ("0,1", "2,3", "4", "5")
    machine = machines.Machine(cores=cores, nodes={0: ("0-5", 16)}, fast="0-3")
    assert [each.cpus for each in plan(2, machine)] == [(0, 1, 4), (2, 3, 5)]


def test_no_more_engines_than_cores(plan):
    with pytest.raises(StartError, match="is 3, but node 0 allows at most 2, one"):
        plan(3, one_node(2))


def test_several_engines_do_not_share_a_gpu(plan):
    with pytest.raises(StartError, match="starts 2 engines, which need --device cpu"):
        plan(2, one_node(8), on_gpu=True)
    assert plan(1, one_node(8), on_gpu=True) == []


@pytest.mark.parametrize(
    ("device", "file", "found"),
    [
        ("auto", "", False),
        ("auto", "dev/nvidiactl", True),
        ("cpu", "dev/nvidiactl", False),
        ("cuda", "", True),
    ],
)
def test_whether_there_may_be_a_gpu(tmp_path, device, file, found):
    if file:
        (tmp_path / "dev").mkdir()
        (tmp_path / file).touch()
    assert has_gpu(device, tmp_path) is found


def test_weights_are_the_models_files(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    assert weights_bytes(tmp_path) == 5
    for number in (1, 2):
        (tmp_path / f"a-{number:05d}-of-00002.gguf").write_bytes(bytes(number))
    assert weights_bytes(tmp_path / "a-00001-of-00002.gguf") == 3


def test_this_machine_is_read(tmp_path):
    machine = engine_plan.read_machine("cpu", tmp_path)
    assert machine.nodes
    assert machine.memory > GIB


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("off", "off"), ("2", 2), (3, 3)])
def test_what_may_be_set(text, value):
    assert ServeSettings(engines_per_node=text).engines_per_node == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_what_may_not_be_set(text):
    with pytest.raises(ValidationError, match="must be auto, off, or a number from 1"):
        ServeSettings(engines_per_node=text)


def test_where_it_may_be_set(tmp_path, monkeypatch):
    file = tmp_path / "octavo.toml"
    file.write_text('model = "demo"\nengines-per-node = 4\n[serve]\nengines-per-node = "off"\n')
    assert ServeSettings.load(config=file).engines_per_node == "off"
    assert EngineSettings.load(config=file).model == "demo"
    monkeypatch.setenv("OCTAVO_ENGINES_PER_NODE", "2")
    assert ServeSettings.load(config=file).engines_per_node == 2
    with pytest.raises(SettingsError, match=r"^--engines-per-node: must be auto, off, or a number"):
        ServeSettings.load(engines_per_node="many")
