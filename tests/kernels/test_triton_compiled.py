"""Compiles the kernels for GPUs that are not here, and reads what became of them.

Triton brings its own assembler; without a device it can be asked for any. What is
read off the machine code: that keys and values come by asynchronous copies of 16
bytes, that products run on the matrix units, that registers suffice, and that
programs fit into shared memory, and how many instructions a tile of keys takes.
"""

import itertools
import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from octavo.kernels.triton.copy_blocks import _swap_blocks_kernel  # noqa: E402
from octavo.kernels.triton.draw_tokens import _INFINITY, _TILE, _WARPS, _draw_tokens_kernel  # noqa: E402
from octavo.kernels.triton.merge_splits import merge_splits  # noqa: E402
from octavo.kernels.triton.paged_attention import SMALL, _operands, _paged_attention_kernel  # noqa: E402
from octavo.kernels.triton.rotate_and_write import _rotate_and_write_kernel  # noqa: E402
from octavo.kernels.triton.tiles import Gpu, choose_tiles, count_resident  # noqa: E402
from octavo.kernels.triton.write_kv import _write_kv_kernel, warps_for  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: there is nothing to compile", allow_module_level=True)

KIB = 1024
A100 = Gpu("A100", (8, 0), 163 * KIB, 108)
RTX_3090 = Gpu("RTX 3090", (8, 6), 99 * KIB, 82)
RTX_4090 = Gpu("RTX 4090", (8, 9), 99 * KIB, 128)
H100 = Gpu("H100", (9, 0), 227 * KIB, 132)
B200 = Gpu("B200", (10, 0), 227 * KIB, 148)
RTX_5090 = Gpu("RTX 5090", (12, 0), 99 * KIB, 170)
OTHERS = (RTX_3090, RTX_4090, RTX_5090, B200)
IN_PLACE = {H100: "wgmma.mma_async", B200: "tcgen05.mma"}
SPARED = 40  # bytes of stack: Triton 3.6 puts some numbers aside, 3.9 hardly any
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for(gpu, kernel, types, constants, *, aligned=(), warps=4, stages=2):
    """Compiles a kernel whose arguments are i32 but for `types` and `constants`."""
    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    arch = gpu.capability[0] * 10 + gpu.capability[1]
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, GPUTarget("cuda", arch, 32), options)


def resources(made, path):
    """What a compiled kernel takes: registers, and bytes of stack, where they spill to."""
    path.write_bytes(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK")}


def first_loop(path):
    """The instructions of a kernel's first loop: in attention, of the tiles that all rows see."""
    command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    label_or_instruction = r"^(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;"
    instructions, labels = [], {}
    for label, instruction in re.findall(label_or_instruction, told, re.MULTILINE):
        if label:
            labels[label] = len(instructions)
            continue
        instructions.append(instruction)
        branch = re.match(r"BRA.*`\((\.L_\w+)\)", instruction)
        if branch and branch[1] in labels:
            return instructions[labels[branch[1]] :]
    raise AssertionError("there is no loop")


def compile_attention(gpu, kind, *, group, head_dim, dtype, cache_dtype, block_size, features=""):
    """Compiles attention with the tiles that a GPU would choose; returns them, too."""
    tiles = choose_tiles(
        kind, gpu, group=group, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype
    )
    types = dict.fromkeys(("query", "out"), "*" + NAMES[dtype])
    types |= dict.fromkeys(("key_cache", "value_cache"), "*" + NAMES[cache_dtype])
    types |= dict.fromkeys(("partial_out", "partial_lse", "alibi_slopes"), "*fp32")
    types |= dict.fromkeys(("items", "query_starts", "seq_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("factor", "value_scale", "soft_cap"), "fp32")
    aligned = ("query", "out", "key_cache", "value_cache", "block_tables")
    strides = ("query_token_stride", "query_head_stride", "block_stride")
    constants = {
        "DTYPE": _operands(dtype, cache_dtype),
        "NUM_HEADS": 8 * group,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "ROWS": tiles.rows,
        "PARTIAL_ROWS": min(tiles.rows, group),
        "KEYS": tiles.keys,
        "LEAST_TILES": 4,
        "HAS_WINDOW": "window" in features,
        "HAS_CAP": "cap" in features,
        "HAS_ALIBI": "alibi" in features,
        "LOG2_E": 1.44,
        "SMALL": SMALL,
        "UPCAST": False,
    }
    made = compile_for(
        gpu,
        _paged_attention_kernel,
        types,
        constants,
        aligned=aligned + strides,
        warps=tiles.warps,
        stages=tiles.stages,
    )
    return made, tiles


BF16, E4M3, E5M2, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
COMMON = {"group": 4, "head_dim": 128, "dtype": BF16, "cache_dtype": BF16, "block_size": 16}
# Instructions that a warp may take for a tile: on an H100, reading 64 keys of a bf16 cache at
# its bandwidth takes 2,450 cycles, in which its four schedulers issue 9,800; two programs of
# four warps each share them. (Triton 3.6 takes 300, 537, 367, 293, 345.)
FAST = [
    (H100, "decode", COMMON, 340),
    (H100, "decode", COMMON | {"cache_dtype": E4M3}, 600),
    (H100, "chunk", COMMON, 410),
    (A100, "decode", COMMON, 330),
    (A100, "chunk", COMMON, 390),
]
VARIANTS = [
    {"group": 1},
    {"group": 7, "head_dim": 64},
    {"block_size": 8},
    {"block_size": 256},
    {"features": "window"},
    {"features": "window cap alibi"},
    {"head_dim": 80},
    {"head_dim": 256, "features": "window cap"},
    {"head_dim": 32},
    {"group": 71, "head_dim": 64},
    {"cache_dtype": E5M2},
    {"dtype": FP32, "cache_dtype": FP32, "features": "window"},
    {"dtype": FP32, "cache_dtype": FP32, "head_dim": 256},
    {"dtype": torch.float16, "cache_dtype": torch.float16},
]
SLOW = [
    (gpu, kind, COMMON | variant)
    for gpu, kind, variant in itertools.product((A100, H100), ("decode", "chunk"), VARIANTS)
]
SLOW += [
    (gpu, kind, COMMON | variant)
    for gpu, kind, variant in itertools.product(
        OTHERS,
        ("decode", "chunk"),
        ({}, {"head_dim": 256}, {"cache_dtype": E5M2}),
    )
]
SLOW += [(gpu, "chunk", COMMON | {"cache_dtype": E4M3}) for gpu in (RTX_4090, RTX_5090, H100, B200)]


def check_attention(gpu, kind, case, path):
    made, tiles = compile_attention(gpu, kind, **case)
    assert made.metadata.shared <= gpu.shared_bytes
    taken = resources(made, path)
    assert taken["STACK"] <= SPARED, (tiles, taken)
    assert taken["REG"] * tiles.warps * 32 <= 64 * KIB
    code = made.asm["ptx"]
    widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^;]*?, 0x(\w+)", code))
    assert widths, "nothing is fetched ahead"
    # fp8 values, whose rows become columns, go by 8.
    assert widths <= ({"10", "8"} if case["cache_dtype"] in (E4M3, E5M2) else {"10"})
    if case["dtype"] != FP32:
        product = IN_PLACE.get(gpu, "mma.sync") if tiles.rows >= 64 else "mma.sync"
        assert product in code
    threads = 32 * tiles.warps
    shape = {key: case[key] for key in ("head_dim", "dtype", "cache_dtype")}
    resident = count_resident(tiles, gpu, **shape)
    assert resident * (made.metadata.shared + KIB) <= gpu.shared_bytes + KIB
    assert resident * taken["REG"] * threads <= 64 * KIB
    if kind == "decode":  # two programs side by side, for each of which a KiB is reserved
        assert 2 * (made.metadata.shared + KIB) <= gpu.shared_bytes + KIB


# Before the rest: up to Triton 3.6, how a process converts to fp8 is settled by the first GPU that
# it compiles for, and what the A100 does all do.
@pytest.mark.parametrize("gpu", [A100, H100], ids=lambda gpu: gpu.name)
def test_the_others(gpu, tmp_path):
    made = []
    types = dict.fromkeys(("out",), "*bf16")
    types |= dict.fromkeys(("partial_out", "partial_lse"), "*fp32")
    types |= dict.fromkeys(("items", "query_starts", "seq_lens"), "*i32")
    constants = {"NUM_HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "PADDED_DIM": 128, "ROWS": 16}
    constants |= {"PARTIAL_ROWS": 16, "KEYS": 64, "LEAST_TILES": 4, "HAS_WINDOW": True}
    for rows, pieces in ((1, 32), (8, 4)):
        taken = {"MERGED_ROWS": rows, "PIECES": pieces}
        made.append(compile_for(gpu, merge_splits, types, constants | taken))

    for kept in ("bf16", "fp8e5"):
        types = dict.fromkeys(("key", "value"), "*bf16") | {"slot_mapping": "*i64"}
        types |= dict.fromkeys(("key_cache", "value_cache"), "*" + kept)
        types |= dict.fromkeys(("key_scale", "value_scale"), "fp32")
        constants = {"NUM_KV_HEADS": 3, "HEAD_DIM": 80, "PADDED": 256, "LARGEST": 57344.0}
        made.append(compile_for(gpu, _write_kv_kernel, types, constants, warps=warps_for(256)))

    types = dict.fromkeys(("query", "key", "value", "out", "cos", "sin"), "*bf16")
    types |= dict.fromkeys(("key_cache", "value_cache"), "*bf16") | {"slot_mapping": "*i64"}
    types |= dict.fromkeys(("key_scale", "value_scale"), "fp32")
    constants = {"NUM_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "PADDED_HEADS": 16}
    constants |= {"PADDED_KV_HEADS": 4, "PADDED_HALF": 64, "LARGEST": 3e38}
    warps = warps_for(16 * 64)
    made.append(compile_for(gpu, _rotate_and_write_kernel, types, constants, warps=warps))

    types = dict.fromkeys(("source", "destination"), "*i32")
    types |= dict.fromkeys(("source_blocks", "destination_blocks"), "*i64")
    made.append(compile_for(gpu, _swap_blocks_kernel, types, {"WORDS": 1024}))
    assert [resources(kernel, tmp_path / "cubin")["STACK"] for kernel in made] == [0] * len(made)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rotation_and_writes_leave_registers_for_other_programs(dtype, tmp_path):
    name, heads = "*" + NAMES[dtype], 128
    scales = dict.fromkeys(("key_scale", "value_scale"), "fp32") | {"slot_mapping": "*i64"}
    pointers = ("query", "key", "value", "cos", "sin", "out", "key_cache", "value_cache")
    types = dict.fromkeys(pointers, name) | scales
    constants = {"HEAD_DIM": 128, "NUM_KV_HEADS": heads, "LARGEST": 3e38}
    padded = {"PADDED_HEADS": heads, "PADDED_KV_HEADS": heads, "PADDED_HALF": 64}
    rotating = constants | {"NUM_HEADS": heads} | padded
    writing = constants | {"PADDED": heads * 128}
    for kernel, given, elements in (
        (_rotate_and_write_kernel, rotating, heads * 64),
        (_write_kv_kernel, writing, heads * 128),
    ):
        warps = warps_for(elements)
        kinds = {key: types[key] for key in types if key in kernel.arg_names}
        strides = [key for key in kernel.arg_names if key.endswith("stride")]
        aligned = [key for key in kinds if key in pointers] + strides
        made = compile_for(H100, kernel, kinds, given, aligned=aligned, warps=warps)
        taken = resources(made, tmp_path / "cubin")
        assert taken["STACK"] == 0
        assert taken["REG"] <= 128


@pytest.mark.parametrize(("gpu", "kind", "case", "most"), FAST)
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
    types = {"logits": "*fp32", "draws": "*fp64", "out": "*i64"}
    constants = {"TILE": _TILE, "INFINITY": _INFINITY}
    made = compile_for(
        gpu,
        _draw_tokens_kernel,
        types,
        constants,
        aligned=("logits", "vocab_size"),
        warps=_WARPS,
    )
    assert "ld.global.v4" in made.asm["ptx"]
    taken = resources(made, tmp_path / "cubin")
    assert taken["STACK"] <= SPARED
    assert taken["REG"] * _WARPS * 32 <= 64 * KIB
