"""Compiles the kernels for AMD's GPUs, and checks the assembly.

Checks: no loop spills registers to memory, keys and values come by loads of 16 bytes, products run
on the matrix units, instructions convert fp8, and the expected number of programs fit into
registers and shared memory.
"""

import itertools
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
from packaging.version import Version

triton = pytest.importorskip("triton")

from octavo.kernels.gpu import MAX_THREADS, Gpu  # noqa: E402
from octavo.kernels.triton.tiles import MIN_ROWS, count_resident  # noqa: E402
from tests.kernels.compiling import (  # noqa: E402
    BF16,
    COMMON,
    E4M3,
    E4M3FNUZ,
    E5M2,
    FP32,
    KIB,
    VARIANTS,
    Shape,
    compile_attention,
    compile_beside_products,
    compile_code_write,
    compile_copies,
    compile_draws,
    compile_experts,
    compile_linear,
    compile_low_rank,
    compile_masks,
    compile_merges,
    compile_quantized_experts,
    compile_rotation,
    compile_sum,
    compile_wide_writes,
    compile_write,
)
from tests.kernels.quantized_weights import KINDS, random_weight  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there is nothing to compile", allow_module_level=True)

MI300X = Gpu("MI300X", "gfx942", 64, 64 * KIB, 304)
MI355X = Gpu("MI355X", "gfx950", 64, 160 * KIB, 256)
RX_7900 = Gpu("RX 7900 XTX", "gfx1100", 32, 64 * KIB, 48)
GPUS = (MI300X, MI355X, RX_7900)
PRODUCTS = {MI300X: "v_mfma_", MI355X: "v_mfma_", RX_7900: "v_wmma_"}
CONVERSIONS = {E4M3FNUZ: "v_cvt_pk_f32_fp8", E4M3: "v_cvt_scalef32_pk_f16_fp8"}
FETCH = r"\b(?:global_load|buffer_load)(?:_lds)?_(?:dwordx4|b128)\b"
SPILL = re.compile(r"\s+scratch_(?:load|store)")

OLD = Version(triton.__version__) < Version("3.9")


@dataclass(frozen=True)
class Code:
    """A compiled kernel's registers and spills.

    Attributes:
        registers: Vector registers per thread.
        spilled: Spilled vector registers.
        spills: Instructions that load or store spilled registers.
        spills_in_loops: Those that run more than once.
    """

    registers: int
    spilled: int
    spills: int
    spills_in_loops: int


def read(made):
    """Read the assembly of a compiled kernel."""
    text = made.asm["amdgcn"]
    lines = text.splitlines()
    labels, loops = {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = number
        branch = re.match(r"\s+s_c?branch\w*\s+(\.LBB\w+)", line)
        if branch and branch[1] in labels:
            loops.append(range(labels[branch[1]], number))
    spills = [number for number, line in enumerate(lines) if SPILL.match(line)]
    registers, spilled = (
        int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    assert bool(spills) == bool(spilled), "spills are not recognized"
    inside = sum(any(number in loop for loop in loops) for number in spills)
    return Code(registers, spilled, len(spills), inside)


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def may_spill(gpu, shape):
    """Return whether the widest heads need more registers than a thread of this GPU has.

    Triton 3.9 fits 256 elements into registers unless they are float32; 3.7 does not. Others are
    padded to a power of two.
    """
    padded = shape.heads.padded
    wide = shape.head_dim > 256 or (padded == 256 and (OLD or shape.dtype == FP32))
    return gpu is RX_7900 and wide


def name_of(value):
    """Name a test's argument."""
    if isinstance(value, Gpu):
        return value.arch
    if isinstance(value, Shape):
        named = (
            f"{field.name}={getattr(value, field.name)}"
            for field in fields(value)
            if getattr(value, field.name) != field.default
        )
        return ",".join(named).replace("torch.", "") or "common"
    return None


def check_attention(gpu, kind, shape, record):
    made, tiles = compile_attention(gpu, kind, shape)
    code, text = read(made), made.asm["amdgcn"]
    record("code", f"{tiles}, {code}, {made.metadata.shared} bytes shared")
    if not may_spill(gpu, shape):
        assert not code.spills_in_loops, (tiles, code)
    if shape.head_dim >= MIN_ROWS:  # smaller tiles have less than 16 bytes per thread
        assert re.search(FETCH, text)
    if gpu is not RX_7900 or shape.dtype != FP32:
        assert PRODUCTS[gpu] in text
    if shape.cache_dtype in CONVERSIONS:
        assert CONVERSIONS[shape.cache_dtype] in text
    threads = gpu.warp_size * tiles.warps
    assert threads <= MAX_THREADS
    dtypes = {key: getattr(shape, key) for key in ("dtype", "cache_dtype")}
    resident = count_resident(tiles, gpu, shape.heads, **dtypes)
    assert resident * made.metadata.shared <= gpu.shared_bytes
    if "alibi" not in shape.features:  # all options together take a few more registers
        assert resident * code.registers * threads <= gpu.registers
    if kind == "decode" and shape.head_dim <= (255 if gpu is RX_7900 else 256):
        assert 2 * made.metadata.shared <= gpu.shared_bytes


FAST = [
    (MI300X, "decode", replace(COMMON, head_dim=64, cache_dtype=E4M3FNUZ)),
    (RX_7900, "chunk", COMMON),
]
ADDED = [
    COMMON,
    replace(COMMON, small_cache=True),
    replace(COMMON, small_cache=True, block_size=256, features="window"),
    replace(COMMON, group=71),
    replace(COMMON, group=32, head_dim=256),
    replace(COMMON, group=32, features="window"),
    replace(COMMON, group=20, head_dim=64, dtype=FP32, cache_dtype=FP32),
]
OWN = {MI300X: E4M3FNUZ, MI355X: E4M3}
SLOW = list(itertools.product(GPUS, ("decode", "chunk"), VARIANTS + ADDED))
SLOW += [
    (gpu, kind, replace(COMMON, cache_dtype=dtype))
    for (gpu, dtype), kind in itertools.product(OWN.items(), ("decode", "chunk"))
]


@pytest.mark.parametrize(("gpu", "kind", "shape"), FAST, ids=name_of)
def test_attention(gpu, kind, shape, record_property):
    check_attention(gpu, kind, shape, record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "kind", "shape"), SLOW, ids=name_of)
def test_attention_in_every_shape(gpu, kind, shape, record_property):
    check_attention(gpu, kind, shape, record_property)


ONE_IS_FAST = [MI300X, *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in GPUS[1:])]


@pytest.mark.parametrize("gpu", ONE_IS_FAST, ids=name_of)
def test_the_others(gpu, record_property):
    made = [
        *compile_merges(gpu),
        *compile_merges(gpu, 512),
        compile_rotation(gpu),
        compile_copies(gpu),
        compile_masks(gpu),
        *compile_low_rank(gpu),
    ]
    made += [compile_code_write(gpu, dtype) for dtype in (BF16, FP32)]
    made += [compile_write(gpu, dtype) for dtype in (BF16, E5M2, gpu.e4m3) if dtype is not None]
    codes = [read(kernel) for kernel in made]
    record_property("code", str(codes))
    assert [code.spilled for code in codes] == [0] * len(codes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("gpu", GPUS, ids=name_of)
def test_rotation_and_writes_of_many_heads(gpu, dtype, record_property):
    codes = [read(made) for made in compile_wide_writes(gpu, dtype)]
    record_property("code", str(codes))
    assert [code.spilled for code in codes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=name_of)
def test_draws(gpu, record_property):
    made = compile_draws(gpu)
    code = read(made)
    record_property("code", str(code))
    assert not code.spills_in_loops
    assert code.registers * MAX_THREADS <= gpu.registers
    assert made.metadata.num_warps * gpu.warp_size == MAX_THREADS


@pytest.mark.parametrize("rows", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 200))])
@pytest.mark.parametrize("gpu", ONE_IS_FAST, ids=name_of)
def test_experts(gpu, rows, record_property):
    made = compile_experts(gpu, rows)
    codes = [read(kernel) for kernel in [*made, compile_sum(gpu)]]
    record_property("code", str(codes))
    assert [code.spilled for code in codes] == [0] * len(codes)
    for kernel in made:
        assert kernel.metadata.shared <= gpu.shared_bytes
        assert PRODUCTS[gpu] in kernel.asm["amdgcn"]


@pytest.mark.parametrize("rows", [1, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=() if n == "nested" else pytest.mark.slow) for n in KINDS]
)
@pytest.mark.parametrize("gpu", ONE_IS_FAST, ids=name_of)
def test_quantized_linear(gpu, kind, rows, record_property):
    weight = random_weight(kind, 64, 4096, 32, torch.Generator().manual_seed(0))
    made = compile_linear(gpu, weight, rows)[0]
    codes = [read(kernel) for kernel in (made, *compile_beside_products(gpu))]
    record_property("code", str(codes))
    assert [code.spilled for code in codes] == [0] * len(codes)
    assert made.metadata.shared <= gpu.shared_bytes
    assert PRODUCTS[gpu] in made.asm["amdgcn"]
    assert "denorm_mode_32 3" in made.asm["amdgcn"]  # e2m1 values are subnormal before scaling


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["e2m1", "points", "e4m3"])
@pytest.mark.parametrize("gpu", ONE_IS_FAST, ids=name_of)
def test_quantized_experts(gpu, kind, rows):
    weight = random_weight(kind, 64, 4096, 32, torch.Generator().manual_seed(0))
    for made, _ in compile_quantized_experts(gpu, weight, rows):
        assert read(made).spilled == 0
        assert made.metadata.shared <= gpu.shared_bytes
        assert PRODUCTS[gpu] in made.asm["amdgcn"]


def test_a_spill_in_a_loop_is_found():
    shape = replace(COMMON, dtype=FP32, cache_dtype=FP32, head_dim=256)
    made, _ = compile_attention(RX_7900, "decode", shape)
    assert read(made).spills_in_loops
