"""The kernels, built for CPUs that this machine is not: all link, and run where they can."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo.kernels import machine
from octavo.kernels.cpu import build

ROOT = Path(__file__).parents[2]
SOURCES = Path(build.__file__).parent
DRIVER = Path(__file__).parent / "driver.cpp"
DRIVEN = ("paged_attention", "write_kv", "argmax", "draw_tokens", "score_tokens")
"""What the driver calls."""
AVX2 = {"avx2", "bmi2", "f16c", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "clwb"}
ICE_LAKE = AVX512 | {"avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "gfni", "vaes"}
AMX = AVX512 | {"amx_tile"}
SHIMS = {f"aoti_torch_cpu_packed_linear{kind}" for kind in ("", "_wide", "_int8", "_int4")}


class Target(NamedTuple):
    """A CPU to build for; `needs` are its flags, of which code may use any."""

    march: str
    needs: set[str]
    has_linear: bool = False

    @property
    def compiler(self):
        return "aarch64-linux-gnu-g++" if self.march.startswith("armv8") else "g++"

    @property
    def runner(self):
        """What runs its programs here: nothing, an emulator, or None if they cannot run."""
        if self.march.startswith("armv8"):
            emulator = shutil.which("qemu-aarch64")
            return [emulator] if emulator else None
        return [] if self.needs <= cpu_flags() else None


TARGETS = (
    Target("skylake-avx512", AVX512),
    Target("icelake-server", ICE_LAKE),
    Target("sapphirerapids", AMX, has_linear=True),
    Target("armv8.2-a", set()),
)


def cpu_flags():
    lines = machine.CPU_INFO.read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def run(*command, timeout=120.0, **environment):
    # A test of its own must not take itself for a worker of these.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def skip_unless(compiler, needed=frozenset()):
    if compiler == "g++" and platform.machine() != "x86_64":
        pytest.skip("g++ is not for x86 here")
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    if lacking := needed - cpu_flags():
        pytest.skip(f"this CPU lacks {lacking}")


def symbols(library, which):
    lines = run("nm", "-D", which, library).splitlines()
    return {line.split()[-1] for line in lines}


@pytest.mark.parametrize(
    "target",
    [*TARGETS, pytest.param(Target("x86-64", set()), marks=pytest.mark.slow)],
    ids=lambda target: target.march,
)
def test_builds_whole_for(target, tmp_path):
    """Nothing is left undefined, and linear kernels are there whole or not at all."""
    skip_unless(target.compiler)
    flags = [flag for flag in build.FLAGS if not flag.startswith("-O")]
    flags += [f"-march={target.march}", "-O1" if target.runner is not None else "-O0"]
    sources = [*(SOURCES / name for name in build.SOURCES), DRIVER]

    def compiled(source):
        made = tmp_path / f"{source.stem}.o"
        run(target.compiler, *flags, f"-I{SOURCES}", "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *objects, driver = pool.map(compiled, sources)
    library = tmp_path / "library.so"
    run(target.compiler, "-shared", *objects, "-o", library)
    undefined = symbols(library, "--undefined-only")
    assert not {name for name in undefined if name.startswith("octavo")}
    assert "aoti_torch_empty_strided" in undefined, "PyTorch's own come from PyTorch"
    defined = symbols(library, "--defined-only")
    assert "octavo_has_linear" in defined
    assert defined & SHIMS == (SHIMS if target.has_linear else set())
    if target.runner is not None:
        program = tmp_path / "driver"
        driven = [made for made in objects if made.stem in DRIVEN]
        run(target.compiler, "-static", "-fopenmp", driver, *driven, "-o", program)
        assert "0 failures" in run(*target.runner, program)


def run_tests(march, chosen, tmp_path, **environment):
    """Run the kernels' tests with a library for another CPU, as a process of its own."""
    if march == "haswell":
        environment |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return run(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"),
        *("tests/kernels/test_cpu.py", "-k", chosen),
        timeout=900.0,
        OCTAVO_MARCH=march,
        OCTAVO_CACHE_DIR=str(tmp_path),
        **environment,
    )


def test_loads_and_runs_what_is_built_for_avx2(tmp_path):
    """Through OCTAVO_MARCH, and all of PyTorch held to the same."""
    skip_unless("g++", AVX2)
    compiler = tmp_path / "c++"  # which does without half of the optimisation, and of the time
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O1\n')
    compiler.chmod(0o755)
    chosen = "native and (split or any_number or test_argmax or refuses)"
    assert " passed" in run_tests("haswell", chosen, tmp_path, CXX=str(compiler))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("march", "needs"),
    [("haswell", AVX2), ("skylake-avx512", AVX512), ("icelake-server", ICE_LAKE)],
)
def test_all_that_the_kernels_do_is_right_for(march, needs, tmp_path):
    skip_unless("g++", needs)
    assert " passed" in run_tests(march, "native or scores or draws", tmp_path)


@pytest.mark.parametrize("variable", machine.ISA_VARIABLES)
def test_what_holds_code_to_a_part_of_the_cpu_tells_builds_apart(variable, monkeypatch):
    """The identity is part of the name of the kernels' library, and of compiled models."""
    monkeypatch.delenv(variable, raising=False)
    whole = machine.cpu_identity()
    monkeypatch.setenv(variable, "avx2")
    assert machine.cpu_identity() != whole


def test_the_compiler_is_told_the_cpu(monkeypatch):
    monkeypatch.delenv(machine.MARCH, raising=False)
    assert machine.compiler_target() in {"-march=native", "-mcpu=native"}
    monkeypatch.setenv(machine.MARCH, "haswell")
    assert machine.compiler_target() == "-march=haswell"


@pytest.mark.parametrize(
    ("flags", "held_to", "expected"),
    [
        ("fpu avx512_bf16 amx_tile amx_bf16", None, True),
        ("fpu avx512_bf16 amx_tile amx_bf16", "DEFAULT", True),
        ("fpu avx512_bf16 amx_tile amx_bf16", "avx512_core_amx", True),
        ("fpu avx512_bf16 amx_tile amx_bf16", "AVX512_CORE_BF16", False),
        ("fpu avx512_bf16", None, False),
    ],
)
def test_onednn_has_amx(flags, held_to, expected, tmp_path, monkeypatch):
    """Own linear kernels are left to CPUs without it, whatever they were compiled for."""
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if held_to:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", held_to)
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "CPU_INFO", info)
    assert machine.onednn_has_amx() == expected


@pytest.mark.slow
def test_clang_is_refused_in_plain_words_where_it_cannot_serve(tmp_path):
    """Its OpenMP code needs a runtime that PyTorch's wheels do not bring."""
    skip_unless("clang++")
    loaded = run(
        *(
            sys.executable,
            "-c",
            "from octavo.kernels import cpu; print(cpu.warning)",
        ),
        CXX="clang++",
        OCTAVO_CACHE_DIR=str(tmp_path),
    )
    assert loaded == "None\n" or "install g++, or set CXX to it" in loaded


INT8 = """
import torch
from torch import nn
from octavo.engine.models.quantization.int8 import OneDnnInt8Linear
torch.manual_seed(0)
whole = torch.randint(-127, 128, (64, 576), dtype=torch.int8)
layer = OneDnnInt8Linear(nn.Linear(576, 64, False), whole, torch.full((64,), 0.01), torch.ones(576))
rows = torch.rand(8, 576) + 5
expected = rows @ (whole * 0.01).T
print(float((layer(rows) - expected).norm() / expected.norm()))
"""


@pytest.mark.parametrize(
    "isa",
    [
        "AVX2",
        pytest.param("AVX512_CORE", marks=pytest.mark.slow),
        pytest.param("DEFAULT", marks=pytest.mark.slow),
    ],
)
def test_onednn_does_not_overflow_in_8_bits(isa):
    """Without VNNI it adds pairs of products in 16 bits."""
    assert float(run(sys.executable, "-c", INT8, ONEDNN_MAX_CPU_ISA=isa)) < 0.02
