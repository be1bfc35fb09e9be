"""Compiles the kernels for NVIDIA's GPUs, and checks the machine code.

Checks: keys and values come by asynchronous copies of 16 bytes, products run on the matrix units,
registers suffice, programs fit into shared memory, and the number of instructions per tile of keys.
`test_triton_compiled_amd.py` does the same for AMD's.
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from octavo.kernels.gpu import MAX_THREADS  # noqa: E402
from octavo.kernels.triton.tiles import count_resident  # noqa: E402
from tests.kernels.compiling import (  # noqa: E402
    A100,
    B200,
    BF16,
    COMMON,
    E4M3,
    E5M2,
    FP32,
    H100,
    INT8,
    KIB,
    LATENT,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    VARIANTS,
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
from tests.kernels.sass import disassembled, first_loop, resources  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there is nothing to compile", allow_module_level=True)

OTHERS = (RTX_3090, RTX_4090, RTX_5090, B200)
IN_PLACE = {H100: "wgmma.mma_async", B200: "tcgen05.mma"}
SPARED = 40  # bytes of stack: Triton 3.6 spills some values, 3.9 hardly any


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def overwritten(instructions):
    """Return the instructions that write registers that a product of Hopper may still read.

    ptxas before 13.3 may emit them. A product reads its first operand from four registers, after
    the instruction has ended, until a wait for its group. Jumps are not followed.
    """
    last, groups, found = set(), [], []
    for instruction in instructions:
        name, *operands = re.split(r",? ", instruction)
        if re.match("[HQI]GMMA", name):
            if register := re.match(r"R(\d+)$", operands[1]):
                last |= set(range(int(register[1]), int(register[1]) + 4))
            if "gsb0" in operands:
                groups.append(last)
                last = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands[1], 16)
            groups = groups[len(groups) - left :]
        elif register := re.match(r"(?:P\w+, )?R(\d+),", ", ".join(operands)):
            width = 4 if re.search(r"\.128|\.4$", name) else 2 if re.search(r"64|WIDE", name) else 1
            written = set(range(int(register[1]), int(register[1]) + width))
            if written & last.union(*groups):
                found.append(instruction)
    return found


# Maximum instructions of a warp per tile: on an H100, reading 64 keys of a bf16 cache at full
# bandwidth takes 2,450 cycles, in which four schedulers issue 9,800; two programs of four warps
# share them. (Triton 3.6 takes 300, 537, 367, 293, 345.)
COUNTED = [
    (H100, "decode", COMMON, 340),
    (A100, "chunk", COMMON, 390),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (H100, "decode", replace(COMMON, cache_dtype=E4M3), 600),
            (H100, "decode", replace(COMMON, cache_dtype=INT8), 900),
            (H100, "chunk", COMMON, 410),
            (A100, "decode", COMMON, 330),
            (H100, "decode", LATENT, 1000),
        )
    ),
]
SLOW = [
    (gpu, kind, shape)
    for gpu, kind, shape in itertools.product((A100, H100), ("decode", "chunk"), VARIANTS)
]
SLOW += [
    (gpu, kind, shape)
    for gpu, kind, shape in itertools.product(
        OTHERS,
        ("decode", "chunk"),
        (COMMON, replace(COMMON, head_dim=256), replace(COMMON, cache_dtype=E5M2)),
    )
]
SLOW += [
    (gpu, "chunk", replace(COMMON, cache_dtype=E4M3)) for gpu in (RTX_4090, RTX_5090, H100, B200)
]


def check_attention(gpu, kind, case, path):
    made, tiles = compile_attention(gpu, kind, case)
    assert made.metadata.shared <= gpu.shared_bytes
    taken = resources(made, path)
    assert taken["STACK"] <= SPARED, (tiles, taken)
    assert taken["REG"] * tiles.warps * 32 <= 64 * KIB
    code = made.asm["ptx"]
    widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^;]*?, 0x(\w+)", code))
    assert widths, "nothing is fetched ahead"
    # Values of one byte, whose rows become columns, are copied by 8 bytes.
    assert widths <= ({"10", "8"} if case.cache_dtype.itemsize == 1 else {"10"})
    if case.dtype != FP32:
        product = IN_PLACE.get(gpu, "mma.sync") if tiles.rows >= 64 else "mma.sync"
        assert product in code
    assert not overwritten(own for _, own in disassembled(path) if own)
    threads = 32 * tiles.warps
    dtypes = {key: getattr(case, key) for key in ("dtype", "cache_dtype")}
    resident = count_resident(tiles, gpu, case.heads, **dtypes)
    assert resident * (made.metadata.shared + KIB) <= gpu.shared_bytes + KIB
    assert resident * taken["REG"] * threads <= 64 * KIB
    if (
        kind == "decode" and case.head_dim <= 256
    ):  # two concurrent programs, with a KiB reserved for each
        assert 2 * (made.metadata.shared + KIB) <= gpu.shared_bytes + KIB


LINEAR = [  # weights, inputs of a group, rows, instructions for 64 bytes of each output
    ("nibbles", 128, 16, 780),
    pytest.param("e4m3", 128, 16, 520, marks=pytest.mark.slow),
    pytest.param("e2m1", 32, 16, 860, marks=pytest.mark.slow),
    pytest.param("nested", 32, 64, 640, marks=pytest.mark.slow),
    ("nibbles", 128, 128, 470),  # also 128 outputs: half as many for each row
    pytest.param("points", 128, 128, 470, marks=pytest.mark.slow),
    pytest.param("bytes", 128, 128, 240, marks=pytest.mark.slow),
    pytest.param("nested", 32, 200, 640, marks=pytest.mark.slow),  # a quarter
]


def check_linear(gpu, kind, group, rows, path, dtype=BF16):
    weight = random_weight(kind, 64, 4096, group, torch.Generator().manual_seed(0))
    return check_unpacked(gpu, *compile_linear(gpu, weight, rows, dtype), path, dtype)


def is_spared(dtype, taken, loop):
    """Return whether a product of float32 may spill a little more.

    Without matrix units its loop takes 5,000 instructions, so registers that it only reads may be
    spilled before it: 12 of them by Triton 3.7 for an RTX 5090, read again by 6 instructions.
    """
    writes, reads = (sum(own.startswith(name) for own in loop) for name in ("STL", "LDL"))
    return dtype == FP32 and taken["STACK"] <= 48 and not writes and reads <= len(loop) / 500


def check_unpacked(gpu, made, tiles, path, dtype):
    """Check for asynchronous copies and products on matrix units; return the loop."""
    taken, loop = resources(made, path), first_loop(path)
    assert taken["STACK"] <= SPARED or is_spared(dtype, taken, loop), taken
    beside = 1 if tiles.rows * tiles.warps > 128 * 4 else 2  # concurrent programs
    assert taken["REG"] * tiles.warps * 32 * beside <= 64 * KIB
    assert beside * (made.metadata.shared + KIB) <= gpu.shared_bytes + KIB
    assert not overwritten(own for _, own in disassembled(path) if own)
    code = made.asm["ptx"]
    assert "trap" not in code
    assert ".ftz" not in code, "numbers of e2m1 are subnormal before they are scaled"
    if dtype != FP32:
        assert IN_PLACE.get(gpu, "mma.sync") in code
    assert not [own for own in loop if own.startswith("LDG.")], "waits for memory in the loop"
    return loop


@pytest.mark.parametrize(("kind", "group", "rows", "most"), LINEAR)
def test_quantized_linear(tmp_path, kind, group, rows, most):
    path = tmp_path / "cubin"
    assert len(check_linear(H100, kind, group, rows, path)) <= most
    code = [own for _, own in disassembled(path) if own]
    (first, *_) = (i for i, own in enumerate(code) if re.match(r"HGMMA\S+ R\d+, R\d+,", own))
    read = re.match(r"HGMMA\S+ R\d+, (R\d+),", code[first])[1]
    spoilt = f"IMAD.MOV.U32 {read}, RZ, RZ, R1"
    assert overwritten([*code[: first + 1], spoilt, *code[first + 1 :]]) == [spoilt]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, H100, *OTHERS], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", [1, 32, 64, 100, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_linear_widely(tmp_path, gpu, kind, rows):
    for group, dtype in ((128, BF16), (32, torch.float16), (128, FP32)):
        check_linear(gpu, kind, group, rows, tmp_path / "cubin", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rows"), [("e2m1", 16), ("nibbles", 64)])
def test_quantized_experts(tmp_path, kind, rows):
    check_quantized_experts(H100, kind, rows, tmp_path / "cubin")


def check_quantized_experts(gpu, kind, rows, path, dtype=BF16):
    weight = random_weight(kind, 64, 4096, 32, torch.Generator().manual_seed(0))
    for made, tiles in compile_quantized_experts(gpu, weight, rows, dtype):
        check_unpacked(gpu, made, tiles, path, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, H100, *OTHERS], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("rows", [1, 32, 64, 100, 200])
@pytest.mark.parametrize("kind", ["e2m1", "points", "e4m3", "bytes"])
def test_quantized_experts_widely(tmp_path, gpu, kind, rows):
    for dtype in (BF16, torch.float16):
        check_quantized_experts(gpu, kind, rows, tmp_path / "cubin", dtype)


# Before the rest: up to Triton 3.6, the first GPU that a process compiles for fixes its conversion
# to fp8, and all GPUs can run the A100's.
@pytest.mark.parametrize(
    "gpu", [A100, pytest.param(H100, marks=pytest.mark.slow)], ids=lambda gpu: gpu.name
)
def test_the_others(gpu, tmp_path):
    made = compile_merges(gpu) + compile_merges(gpu, 512)
    made += [compile_code_write(gpu, dtype) for dtype in (BF16, FP32)]
    made += [compile_write(gpu, dtype) for dtype in (BF16, E5M2)]
    made += [compile_rotation(gpu), compile_copies(gpu), compile_masks(gpu)]
    made += [*compile_low_rank(gpu), *compile_beside_products(gpu)]
    assert [resources(kernel, tmp_path / "cubin")["STACK"] for kernel in made] == [0] * len(made)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rotation_and_writes_leave_registers_for_other_programs(dtype, tmp_path):
    for made in compile_wide_writes(H100, dtype):
        taken = resources(made, tmp_path / "cubin")
        assert taken["STACK"] == 0
        assert taken["REG"] <= 128


@pytest.mark.parametrize(("gpu", "kind", "case", "most"), COUNTED)
def test_attention(gpu, kind, case, most, tmp_path):
    check_attention(gpu, kind, case, tmp_path / "cubin")
    loop = first_loop(tmp_path / "cubin")
    assert any(instruction.startswith("LDGSTS") for instruction in loop)
    assert not any(instruction.startswith(("LDL", "STL")) for instruction in loop)  # spilled
    assert len(loop) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "kind", "case"), SLOW)
def test_attention_in_every_shape(gpu, kind, case, tmp_path):
    check_attention(gpu, kind, case, tmp_path / "cubin")


@pytest.mark.parametrize(
    "gpu",
    [A100, H100, *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in OTHERS)],
    ids=lambda gpu: gpu.name,
)
def test_draws(gpu, tmp_path):
    made = compile_draws(gpu)
    assert "ld.global.v4" in made.asm["ptx"]
    taken = resources(made, tmp_path / "cubin")
    assert taken["STACK"] <= SPARED
    assert taken["REG"] * MAX_THREADS <= 64 * KIB


@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (30, 100, 200))]
)
@pytest.mark.parametrize(
    "gpu",
    [H100, *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in (A100, *OTHERS))],
    ids=lambda gpu: gpu.name,
)
def test_experts(gpu, rows, tmp_path):
    for made in compile_experts(gpu, rows):
        assert made.metadata.shared <= gpu.shared_bytes
        taken = resources(made, tmp_path / "cubin")
        assert taken["STACK"] <= SPARED
        assert taken["REG"] * 32 * made.metadata.num_warps <= 64 * KIB
        product = IN_PLACE.get(gpu, "mma.sync") if rows > 32 else "mma.sync"
        assert product in made.asm["ptx"]
        assert "trap" not in made.asm["ptx"]
        loop = first_loop(tmp_path / "cubin")
        assert not any(instruction.startswith(("LDL", "STL")) for instruction in loop)  # spilled
    assert resources(compile_sum(gpu), tmp_path / "cubin")["STACK"] == 0
