"""The assembler of kernels for Hopper and later."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")

from octavo.kernels.gpu import Gpu  # noqa: E402
from octavo.kernels.triton import assembler  # noqa: E402
from octavo.kernels.triton.assembler import choose_assembler  # noqa: E402

KINDS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An environment with three assemblers beside Triton's, one of which does not run."""
    for name in KINDS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for folder, version in (("cu12", "12.9"), ("cu13", "13.5"), ("cu14", "14.0"), ("cu0", None)):
        path = tmp_path / "nvidia" / folder / "bin/ptxas"
        path.parent.mkdir(parents=True)
        path.write_text(
            f"#!/bin/sh\necho Cuda compilation tools, release {version}, V{version}.1\n"
        )
        path.chmod(0o755 if version else 0o644)
    (tmp_path / "triton").mkdir()
    monkeypatch.setattr(assembler.triton, "__file__", str(tmp_path / "triton/__init__.py"))
    monkeypatch.setattr(assembler.shutil, "which", lambda _: None)
    return tmp_path


@pytest.mark.parametrize(
    ("arch", "cuda", "chosen"),
    [
        ("sm_90", "13.0", ["cu13", None]),
        ("sm_90", "12.8", ["cu12", None]),
        ("sm_100", "13.0", [None, "cu13"]),
        ("sm_120", "13.0", [None, "cu13"]),
        ("sm_89", "13.0", [None, None]),
        ("gfx942", None, [None, None]),
    ],
)
def test_hopper_and_later_get_the_newest_of_their_cuda(
    monkeypatch, environment, arch, cuda, chosen
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    choose_assembler(Gpu("any", arch, 32, 227 << 10, 132))
    paths = [folder and str(environment / f"nvidia/{folder}/bin/ptxas") for folder in chosen]
    assert [os.environ.get(kind) for kind in KINDS] == paths


def test_a_users_own_assembler_stays(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(KINDS[0], "/opt/ptxas")
    choose_assembler(Gpu("any", "sm_90", 32, 227 << 10, 132))
    assert os.environ[KINDS[0]] == "/opt/ptxas"


def test_a_gpu_that_is_checked_has_its_assembler_chosen(monkeypatch):
    from octavo.kernels import triton as kernels

    hopper = Gpu("any", "sm_90", 32, 227 << 10, 132)
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "describe_gpu", lambda _: hopper)
    monkeypatch.setattr(kernels, "choose_assembler", chosen.append)
    kernels.check_device(torch.device("cuda"), None)
    assert chosen == [hopper]
