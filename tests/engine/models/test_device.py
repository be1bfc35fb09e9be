"""The choice of a device, on machines of which torch cannot use the GPU."""

import pytest
import torch

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models import device
from octavo.engine.models.device import choose_device

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12080)."


@pytest.fixture(autouse=True)
def with_an_old_driver(monkeypatch, tmp_path):
    """A machine with a GPU, CUDA's build of torch, and a driver that is too old for it."""

    def init():
        raise RuntimeError(f"{OLD_DRIVER} Please update\nyour GPU driver")

    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_refused(name):
    with pytest.raises(UnsupportedModelError, match="driver on your system is too old"):
        choose_device(name)


def test_a_cpu_is_used_where_it_was_asked_for():
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_leave_the_cpu(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto").type == "cpu"


def test_a_torch_for_cpus_uses_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("auto").type == "cpu"


def test_a_machine_without_a_gpu_uses_its_cpu(tmp_path):
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "nvidiactl").touch()
    assert choose_device("auto").type == "cpu"
