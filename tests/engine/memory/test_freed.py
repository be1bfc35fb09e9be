"""Freed memory returns to the system, and memory in use does not change."""

import subprocess
import sys

import psutil
import pytest
import torch

from octavo.engine.memory.freed import return_freed


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_between_what_stays_go_back():
    tensors = [torch.full((16 << 10,), float(i)) for i in range(2000)]  # too small for a mapping
    kept = tensors[::100]
    full = resident()
    del tensors
    return_freed()
    assert full - resident() > 80 << 20, "of 125 MiB"
    assert [tensor.unique().tolist() for tensor in kept] == [[100.0 * i] for i in range(20)]


FREED = """
import psutil, torch
from octavo.engine.memory.freed import mapping_large
resident = lambda: psutil.Process().memory_full_info().uss
with mapping_large():
    tensors = [torch.full((512 << 10,), float(i)) for i in range(60)]
    kept = tensors[::10]
    full = resident()
    del tensors
    print(full - resident() >> 20)
print([tensor.unique().tolist() for tensor in kept])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_is_mapped_by_itself_goes_back_at_once():
    """It runs in a new process, which has no freed memory to reuse."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    freed, kept = done.stdout.splitlines()
    assert int(freed) > 100, "of 108 MiB"
    assert kept == str([[10.0 * i] for i in range(6)])


def resident() -> int:
    return psutil.Process().memory_full_info().uss
