"""The directory of results, and the machine and the commit that are measured."""

import os
import platform
import subprocess
from pathlib import Path

import psutil

RESULTS = Path(__file__).parents[1] / "results"


def machine() -> str:
    """Return the processor, its cores and the memory."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _processor() -> str:
    """Return the processor's name and its relevant vector instructions."""
    source = Path("/proc/cpuinfo")
    if not source.exists():
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in source.read_text().splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    held = [flag for flag in wanted if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({' '.join(held)})"


def commit() -> str:
    """Return the measured commit, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"
