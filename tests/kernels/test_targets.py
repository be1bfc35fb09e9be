"""The kernels built for other CPUs: all link, and run if this machine can run them."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from octavo.kernels import cpu_target
from octavo.kernels.cpu import compile as compiling
from octavo.kernels.cpu import library
from octavo.kernels.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet, supported_sets

ROOT = Path(__file__).parents[2]
SOURCES = Path(compiling.__file__).parent
DRIVER = Path(__file__).parent / "driver.cpp"
STAND_IN = Path(__file__).parent / "emulation" / "torch.cpp"
DRIVEN = (
    *("paged_attention", "write_kv", "argmax", "mask_logits", "draw_tokens", "score_tokens"),
    *("step", "spill"),
)
"""The functions that the driver calls, and the file that attention may read from."""
AVX2 = {"avx2", "bmi2", "f16c", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "clwb"}
ICE_LAKE = AVX512 | {"avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "gfni", "vaes"}
AMX = AVX512 | {"amx_tile"}


class Target(NamedTuple):
    """An instruction set of an architecture."""

    machine: str
    isa: InstructionSet

    @property
    def compiler(self):
        return "aarch64-linux-gnu-g++" if self.machine == "aarch64" else "g++"

    @property
    def runner(self):
        """Return the command prefix that runs its programs here; None if they cannot run."""
        if self.machine == platform.machine():
            return [] if self.isa.needs <= cpu_target.cpu_features() else None
        emulator = shutil.which(f"qemu-{self.machine}")
        return [emulator] if self.machine == "aarch64" and emulator else None


TARGETS = [Target(name, isa) for name, isas in INSTRUCTION_SETS.items() for isa in isas]


def run(*command, timeout=120.0, **environment):
    # A child's tests must not act as workers of these.
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
    if lacking := needed - cpu_target.cpu_features():
        pytest.skip(f"this CPU lacks {lacking}")


def symbols(library, which):
    lines = run("nm", "-D", which, library).splitlines()
    return {line.split()[-1] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.isa.name)
def test_builds_whole_for(target, tmp_path):
    """No symbol stays undefined."""
    objects, driver, stand_in = built_for(target, tmp_path, others="-O0")
    made = tmp_path / "library.so"
    run(target.compiler, "-shared", *objects, "-o", made)
    undefined = symbols(made, "--undefined-only")
    assert not {name for name in undefined if name.startswith("octavo")}
    assert "aoti_torch_empty_strided" in undefined, "PyTorch's own come from PyTorch"
    assert "octavo_register_run" in symbols(made, "--defined-only")
    drive(target, objects, driver, stand_in)


@pytest.mark.slow
def test_runs_on_arm(tmp_path):
    """All sources are valid there; those that the driver calls are right."""
    (target,) = (target for target in TARGETS if target.isa.name == "neon")
    objects, driver, stand_in = built_for(target, tmp_path, others="-fsyntax-only")
    drive(target, objects, driver, stand_in)


def built_for(target, folder, *, others):
    """Compile all sources, `others` than the driver's with that option; return the objects."""
    skip_unless(target.compiler)
    flags = [flag for flag in compiling.FLAGS if not flag.startswith("-O")]
    flags += target.isa.flags

    def compiled(source):
        made = folder / f"{source.stem}.o"
        runs = source in {DRIVER, STAND_IN} or source.stem in DRIVEN
        level = "-O1" if target.runner is not None and source.stem in DRIVEN else "-O0"
        option = level if runs else others
        run(target.compiler, *flags, option, f"-I{SOURCES}", "-c", source, "-o", made)
        return made

    sources = [*(SOURCES / name for name in compiling.SOURCES), DRIVER, STAND_IN]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        *objects, driver, stand_in = pool.map(compiled, sources)
    return objects, driver, stand_in


def drive(target, objects, driver, stand_in):
    """Run the driver with its kernels, if this machine can."""
    if target.runner is not None:
        program = driver.with_name("driver")
        driven = [made for made in objects if made.stem in DRIVEN]
        run(target.compiler, "-static", "-fopenmp", driver, stand_in, *driven, "-o", program)
        assert "0 failures" in run(*target.runner, program)


def run_tests(march, chosen, tmp_path, **environment):
    """Run the kernels' tests with a library for another CPU, in a new process."""
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


@pytest.mark.slow
def test_loads_and_runs_what_is_built_for_avx2(tmp_path):
    """OCTAVO_MARCH selects it, and PyTorch is restricted to the same."""
    skip_unless("g++", AVX2)
    compiler = tmp_path / "c++"  # skips half of the optimisation and of the time
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


def test_a_library_that_cannot_be_loaded_is_compiled_instead(tmp_path, monkeypatch, caplog):
    """A library in a wheel was built for another C library or PyTorch."""
    for isa in INSTRUCTION_SETS.get(platform.machine(), ()):
        (tmp_path / f"{isa.name}.so").write_bytes(b"not a library")
    monkeypatch.delenv(cpu_target.MARCH, raising=False)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setattr(library, "load_compiled", lambda: "compiled")
    assert library.load_library() == "compiled"
    assert "cannot be loaded" in caplog.text


@pytest.mark.parametrize(
    ("machine_name", "lacking", "best"),
    [
        ("x86_64", "", "amx"),
        ("x86_64", "amx_tile", "avx512-bf16"),
        ("x86_64", "avx512_bf16", "avx512-vnni"),
        ("x86_64", "avx512_vnni", "avx512"),
        ("x86_64", "avx512vl", "avx2-vnni"),
        ("x86_64", "avx512vl avx_vnni", "avx2"),
        ("x86_64", "avx512vl avx_vnni f16c", None),
        ("aarch64", "", "neon-bf16"),
        ("aarch64", "i8mm", "neon-dotprod"),
        ("aarch64", "asimddp", "neon"),
        ("riscv64", "", None),
    ],
)
def test_a_cpu_gets_the_best_instruction_set_that_it_has(machine_name, lacking, best):
    known = frozenset().union(*(isa.needs for isa in INSTRUCTION_SETS.get(machine_name, ())))
    found = supported_sets(machine_name, known - set(lacking.split()))
    assert (found[0].name if found else None) == best


@pytest.mark.parametrize("variable", cpu_target.ISA_VARIABLES)
def test_what_holds_code_to_a_part_of_the_cpu_tells_builds_apart(variable, monkeypatch):
    """The CPU's identity is part of the names of the kernels' library and of compiled models."""
    monkeypatch.delenv(variable, raising=False)
    whole = cpu_target.cpu_identity()
    monkeypatch.setenv(variable, "avx2")
    assert cpu_target.cpu_identity() != whole


def test_the_compiler_is_told_the_cpu(monkeypatch):
    monkeypatch.delenv(cpu_target.MARCH, raising=False)
    assert cpu_target.compiler_target() in {"-march=native", "-mcpu=native"}
    monkeypatch.setenv(cpu_target.MARCH, "haswell")
    assert cpu_target.compiler_target() == "-march=haswell"


@pytest.mark.slow
def test_clang_is_refused_in_plain_words_where_it_cannot_serve(tmp_path):
    """Clang's OpenMP code needs a runtime that PyTorch's wheels do not include."""
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
from octavo.engine.models.quantization.rounding import QuantizedWeights, sum_rows
torch.manual_seed(0)
whole = torch.randint(-127, 128, (64, 576), dtype=torch.int8)
scale = torch.full((64,), 0.01)
quantized = QuantizedWeights(whole, scale, sum_rows(whole, scale), torch.ones(576))
layer = OneDnnInt8Linear(nn.Linear(576, 64, False), *quantized)
rows = torch.rand(8, 576) + 5
expected = rows @ (whole * 0.01).T
print(float((layer(rows) - expected).norm() / expected.norm()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "DEFAULT"])
def test_onednn_does_not_overflow_in_8_bits(isa):
    """Without VNNI, oneDNN adds pairs of products in 16 bits."""
    assert float(run(sys.executable, "-c", INT8, ONEDNN_MAX_CPU_ISA=isa)) < 0.02
